"""docker-compose.yml: its services fit together, and fit Weft."""

import pathlib
from typing import Any

import pytest
import yaml

from weft.server.settings import Settings
from weft.server.supervise.supervisor import DRAIN_MARGIN_S

ROOT = pathlib.Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    document = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
    assert isinstance(document, dict)
    return document


@pytest.fixture(scope="module")
def services(compose: dict[str, Any]) -> dict[str, Any]:
    return dict(compose["services"])


def test_only_weft_starts_by_default(services: dict[str, Any]) -> None:
    profiles = {name: service.get("profiles") for name, service in services.items()}
    assert profiles == {"weft": None, "weft-cuda": ["cuda"], "open-webui": ["ui"], "prometheus": ["monitoring"]}


@pytest.mark.parametrize(("name", "target"), [("weft", "cpu"), ("weft-cuda", "cuda")])
def test_weft_has_an_image_a_health_check_and_time_to_drain(services: dict[str, Any], name: str, target: str) -> None:
    service = services[name]
    assert service["build"]["target"] == target
    assert f" AS {target}\n" in (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert "/health" in service["healthcheck"]["test"][-1]
    grace_s = float(service["stop_grace_period"].removesuffix("s"))
    assert grace_s >= Settings().drain_timeout_s + DRAIN_MARGIN_S
    assert service["volumes"] == ["cache:/cache"]
    assert "shm_size" in service
    (port,) = service["ports"]
    assert port.startswith("127.0.0.1:"), "without a key, the world must not reach it"


def test_no_web_page_can_take_a_name_of_its_own_for_weft(services: dict[str, Any]) -> None:
    """In a container Weft listens on every address, where it checks names only if it is told which."""
    for name in ("weft", "weft-cuda"):
        assert services[name]["environment"]["WEFT_ALLOWED_HOSTS"] == "${WEFT_ALLOWED_HOSTS:-weft}"


def test_the_settings_of_weft_exist(services: dict[str, Any]) -> None:
    variables = [name for name in services["weft"]["environment"] if name.startswith("WEFT_")]
    assert variables
    assert {name.removeprefix("WEFT_").lower() for name in variables} <= Settings.model_fields.keys()


def test_the_chat_page_finds_weft_on_cpu_and_gpu(services: dict[str, Any]) -> None:
    page = services["open-webui"]
    assert page["environment"]["OPENAI_API_BASE_URL"] == "http://weft:8000/v1"
    assert page["depends_on"] == {"weft": {"condition": "service_healthy"}}
    assert services["weft-cuda"]["networks"]["default"]["aliases"] == ["weft"]


def test_prometheus_scrapes_weft(services: dict[str, Any]) -> None:
    (mount,) = services["prometheus"]["volumes"]
    source, target, _ = mount.split(":")
    assert target == "/etc/prometheus/prometheus.yml"
    (job,) = yaml.safe_load((ROOT / source).read_text(encoding="utf-8"))["scrape_configs"]
    assert job.get("metrics_path", "/metrics") == "/metrics"
    assert job["static_configs"] == [{"targets": ["weft:8000"]}]


def test_every_named_volume_is_declared_and_every_image_pinned(
    compose: dict[str, Any], services: dict[str, Any]
) -> None:
    used = {mount.split(":")[0] for service in services.values() for mount in service["volumes"]}
    assert {volume for volume in used if not volume.startswith(".")} == compose["volumes"].keys()
    foreign = [service["image"] for service in services.values() if "build" not in service]
    assert all(":v" in image for image in foreign)
