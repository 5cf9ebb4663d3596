"""Models that Ollama's clients fetch and remove, over a mirror of the hub."""

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.hub_mirror import Mirror
from tests.server.conftest import MODEL, Reply, Site
from weft.server.library import library
from weft.server.library.download import held
from weft.server.library.hub import repository_folder

DATA = bytes(range(256)) * 1000


@pytest.fixture
def hub(hub: Mirror) -> Mirror:
    hub.repositories["org/m-GGUF"] = {"m-Q8_0.gguf": DATA, "m-Q4_0.gguf": DATA[1:]}
    return hub


def pulled(site: Site, name: str, **body: Any) -> list[dict[str, Any]]:
    reply = site.call("POST", "/api/pull", json={"model": name, **body})
    assert reply.status == 200
    return [json.loads(line) for line in reply.text.splitlines()]


def tags(site: Site) -> dict[str, Any]:
    return {card["name"]: card for card in json.loads(site.call("GET", "/api/tags").text)["models"]}


def delete(site: Site, name: str) -> Reply:
    return site.call("DELETE", "/api/delete", json={"model": name})


def test_a_model_comes_is_listed_and_goes(site: Site, hub: Mirror) -> None:
    first, *progress, note, last = pulled(site, "org/m-GGUF:Q8_0")
    assert (first, last) == ({"status": "pulling manifest"}, {"status": "success"})
    assert progress[-1]["completed"] == progress[-1]["total"] == len(DATA)
    assert progress[-1]["digest"].startswith("sha256:") and progress[-1]["status"].startswith("pulling ")
    assert note["status"].endswith("serves what it was started with: weft serve org/m-GGUF:Q8_0")
    card = tags(site)["org/m-GGUF:Q8_0"]
    assert card["size"] == len(DATA)
    assert (card["details"]["format"], card["details"]["quantization_level"]) == ("gguf", "Q8_0")
    shown = json.loads(site.call("POST", "/api/show", json={"model": "org/m-GGUF:Q8_0"}).text)
    assert shown["details"] == card["details"]
    assert delete(site, "org/m-GGUF:Q8_0").status == 200
    assert list(tags(site)) == [MODEL, "alias"]
    assert delete(site, "org/m-GGUF:Q8_0").status == 404
    assert pulled(site, "org/m-GGUF:Q4_0", stream=False) == [{"status": "success"}]


def test_a_pull_that_fails_says_so_and_goes_on_the_next_time(site: Site, hub: Mirror) -> None:
    hub.broken["m-Q8_0.gguf"] = [0.4] * 20
    *_, last = pulled(site, "org/m-GGUF:Q8_0")
    assert "102,400 of 256,000 bytes are kept" in last["error"]
    reply = site.call("POST", "/api/pull", json={"model": "org/m-GGUF:Q8_0", "stream": False})
    assert reply.status == 400 and "cannot be fetched" in json.loads(reply.text)["error"]
    hub.broken.clear()
    assert pulled(site, "org/m-GGUF:Q8_0")[-1] == {"status": "success"}
    assert hub.contents()[-1][1] == "bytes=102400-255999"


@pytest.mark.parametrize(
    ("name", "status"),
    [("", 400), ("https://a.example/m.gguf", 400), ("/etc", 404), ("../..", 404), ("llama3.2", 404), ("x.gguf", 404)],
)
def test_addresses_and_folders_are_refused(site: Site, hub: Mirror, name: str, status: int) -> None:
    for method, route in (("POST", "/api/pull"), ("DELETE", "/api/delete")):
        assert site.call(method, route, json={"model": name}).status == status
    assert hub.asked == []


@pytest.mark.parametrize(
    ("settings", "may"),
    [
        ({}, True),
        ({"host": "localhost"}, True),
        ({"host": "0.0.0.0"}, False),
        ({"host": "0.0.0.0", "api_pulls": True}, True),
        ({"api_pulls": False}, False),
        ({"api_key": ("k",)}, False),
        ({"allowed_hosts": ("llm.example",)}, False),
        ({"cors_origins": ("https://a.example",)}, False),
    ],
)
def test_only_the_operator_opens_the_library_to_others(hub: Mirror, settings: dict[str, Any], may: bool) -> None:
    site, headers = Site(**settings), {"authorization": "Bearer k"}
    library.get("org/m-GGUF:Q8_0", lambda remote, num_bytes: None)
    body = {"model": "org/m-GGUF:Q4_0", "stream": False}
    reply = site.call("POST", "/api/pull", json=body, headers=headers)
    assert reply.status == (200 if may else 403)
    assert may or "set api_pulls to allow it" in json.loads(reply.text)["error"]
    listed = json.loads(site.call("GET", "/api/tags", headers=headers).text)["models"]
    assert ("org/m-GGUF:Q8_0" in [card["name"] for card in listed]) == may
    reply = site.call("DELETE", "/api/delete", json={"model": "org/m-GGUF:Q8_0"}, headers=headers)
    assert reply.status == (200 if may else 403)


def test_what_is_served_is_not_removed(hub: Mirror) -> None:
    place = library.get("org/m-GGUF:Q8_0", lambda remote, num_bytes: None)
    site = Site(model=str(place), served_model_name=("mine",))
    for name in ("org/m-GGUF:Q8_0", "mine"):
        reply = delete(site, name)
        assert reply.status == 400 and "is served here" in json.loads(reply.text)["error"]
    assert tags(site)["mine"]["size"] == len(DATA)


@pytest.mark.parametrize("name", ["org/m-GGUF:Q8_0", "org/m-GGUF"])
@pytest.mark.parametrize("place", ["link", "draft"])
def test_what_is_served_is_not_removed_by_another_name(hub: Mirror, tmp_path: Path, name: str, place: str) -> None:
    """It was where the cache is a link, by the name of its whole repository, and if it was a draft."""
    file = library.get("org/m-GGUF:Q8_0", lambda remote, num_bytes: None)
    library.get("org/m-GGUF:Q4_0", lambda remote, num_bytes: None)
    (tmp_path / "link").symlink_to(file.parent)
    site = Site(model=str(tmp_path / "link" / file.name)) if place == "link" else Site(speculative=str(file))
    assert delete(site, name).status == 400 and file.is_file()
    assert delete(site, "org/m-GGUF:Q4_0").status == 200


def test_what_is_being_fetched_is_not_told_to_be_missing(site: Site, hub: Mirror) -> None:
    library.get("org/m-GGUF:Q8_0", lambda remote, num_bytes: None)
    folder = repository_folder("org/m-GGUF")
    with held(folder.parent / ".locks" / folder.name / "weft.lock", "it"):
        reply = delete(site, "org/m-GGUF:Q8_0")
    assert reply.status == 400 and "is being fetched by another process" in json.loads(reply.text)["error"]
    assert delete(site, "org/m-GGUF:Q8_0").status == 200


def test_lists_do_not_wait_for_pulls(site: Site, hub: Mirror) -> None:
    """Both had the same four threads."""
    hub.pause_s = 0.2
    body = {"model": "org/m-GGUF:Q8_0"}
    with site.live() as url, contextlib.ExitStack() as stack:
        streams = [httpx.stream("POST", f"{url}/api/pull", json=body, timeout=100) for _ in range(4)]
        pulls = [stack.enter_context(stream).iter_lines() for stream in streams]
        assert all("pulling manifest" in next(lines) for lines in pulls)
        listed = [card["name"] for card in httpx.get(f"{url}/api/tags", timeout=100).json()["models"]]
    assert MODEL in listed and "org/m-GGUF:Q8_0" not in listed


def test_a_pull_ends_when_its_client_leaves(site: Site, hub: Mirror, tmp_path: Path) -> None:
    hub.pause_s = 0.2

    def num_bytes() -> int:
        return sum(file.stat().st_size for file in (tmp_path / "hf").rglob("*.incomplete"))

    body = {"model": "org/m-GGUF:Q8_0"}
    with site.live() as url, httpx.stream("POST", f"{url}/api/pull", json=body, timeout=100) as reply:
        assert any('"completed"' in line for line in reply.iter_lines())
        reply.close()
        deadline = time.monotonic() + 20
        while (before := num_bytes()) != (time.sleep(0.7), num_bytes())[1]:
            assert time.monotonic() < deadline
    assert 0 < before < len(DATA) and list(library.entries()) == []
