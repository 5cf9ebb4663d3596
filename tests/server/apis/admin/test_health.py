from typing import Any

import pytest

from weft.engine.wire.status_page import Status


@pytest.mark.parametrize("path", ["/health", "/ready"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_well(site: Any, path: str, method: str) -> None:
    assert site.call(method, path).status == 200


@pytest.mark.parametrize("path", ["/health", "/ready"])
@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"is_ready": 0}, "loading"),
        ({"progress_time": 1.0, "stall_time": 2.0}, "has given no sign of life for "),
    ],
)
def test_loading_or_hung(site: Any, path: str, change: Any, told: str) -> None:
    site.engine.page = Status(**{"epoch_id": 1, "is_ready": 1} | change)
    reply = site.call("GET", path)
    assert reply.status == 503
    assert reply.error["code"] == "engine_restarting"
    assert told in reply.error["message"]


def test_a_dead_engine_left_a_page_that_says_ready(site: Any) -> None:
    site.engine.info = None
    assert site.call("GET", "/health").status == 503
    assert site.call("GET", "/ready").status == 503


def test_version(site: Any) -> None:
    assert set(site.call("GET", "/version").json) == {"version"}
