import subprocess
import sys
from typing import Any

import pytest

from weft.server.app.app import create_app


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nope", 404), ("GET", "/v1/nope", 404), ("GET", "/v1/completions", 405), ("PUT", "/health", 405)],
)
def test_unknown_routes(site: Any, method: str, path: str, status: int) -> None:
    reply = site.call(method, path)
    assert reply.status == status
    assert reply.error["type"] == "invalid_request_error"
    assert (reply.error["code"], reply.error["param"]) == (None, None)
    assert path in reply.error["message"]
    if status == 405:
        assert reply.headers["allow"]


def test_documentation(site: Any) -> None:
    paths = site.call("GET", "/openapi.json").json["paths"]
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/detokenize", "/health"} <= set(
        paths
    )


def test_a_name_is_needed(make_site: Any) -> None:
    with pytest.raises(ValueError, match="served_model_name"):
        create_app({}, make_site().settings)


def test_two_apps_do_not_share_anything(make_site: Any) -> None:
    first, second = make_site(), make_site()
    first.chat()
    assert "e2e_request_latency_seconds_count{" in first.call("GET", "/metrics").text
    count = [
        line for line in second.call("GET", "/metrics").text.splitlines() if "e2e_request_latency_seconds_count" in line
    ]
    assert count[0].endswith(" 0.0")


def test_it_and_its_routes_load_nothing_that_a_start_would_wait_for() -> None:
    code = (
        "import sys; from weft.server.app.app import find_routers; assert len([*find_routers()]) > 10\n"
        "print(*{'mcp', 'numpy', 'ray', 'torch', 'transformers'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
