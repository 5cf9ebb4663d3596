"""The application as a config file of Ray Serve has it, such as in KubeRay's RayService."""

import pathlib
from typing import Any

import pytest
import yaml

from weft.server.settings import StartError

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"
)

MANIFEST = pathlib.Path(__file__).parent.parent.parent.parent / "deploy" / "kubernetes" / "ray.yaml"


def build(path: str, args: dict[str, Any]) -> Any:
    """As Ray's controller does it."""
    from ray._common.utils import import_attr
    from ray.serve._private.api import call_user_app_builder_with_args_if_necessary

    return call_user_app_builder_with_args_if_necessary(import_attr(path), args)._bound_deployment


def test_the_manifest_builds_replicas_with_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.serve.schema import ServeDeploySchema

    monkeypatch.setenv("WEFT_API_KEY", "secret")
    *_, manifest = yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8"))
    config = ServeDeploySchema.model_validate(yaml.safe_load(manifest["spec"]["serveConfigV2"]))
    (application,) = config.applications
    deployment = build(application.import_path, application.args)
    settings = deployment.init_args[0]
    assert (settings["model"], settings["api_key"]) == (application.args["model"], ["secret"])
    scaling = deployment._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas) == (1, 4)
    assert deployment.ray_actor_options["num_cpus"] == application.args["cpus"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"prot": 1}, "args: no such setting: prot"),
        ({"port": 9}, "args: port: Ray listens, at the port of http_options, got 9"),
        ({"server_processes": 2}, "server_processes: a replica serves by itself, got 2: take more replicas instead"),
        ({"max_n": 0}, "--max-n: input should be greater than or equal to 1, got 0"),
        ({"ssl_certfile": "a", "ssl_keyfile": "b"}, "ssl_certfile: replicas speak HTTP: end TLS in front of Ray"),
    ],
)
def test_a_wrong_argument_is_named(args: dict[str, Any], message: str) -> None:
    with pytest.raises(StartError) as caught:
        build("weft.server.ray.app:build", args)
    assert str(caught.value) == message
