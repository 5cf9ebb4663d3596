"""Clients of other APIs that leave in the middle of an answer end its request."""

import json
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import ollama
import pytest

from tests.end_to_end.conftest import LiveServer, serving

ASK: Any = [{"role": "user", "content": "Hello"}]
NUM_TOKENS = 50_000


@pytest.fixture(scope="module")
def endless_server(tmp_path_factory: pytest.TempPathFactory, long_model: str) -> Iterator[LiveServer]:
    """A model of which no answer ends by itself: its end of sequence is a token that it never gives."""
    root = tmp_path_factory.mktemp("endless")
    folder = pathlib.Path(shutil.copytree(long_model, root / "weft-demo"))
    for name in ("config.json", "generation_config.json"):
        fields = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(fields | {"eos_token_id": 0}))
    with serving(root / "server.log", str(folder), "--dtype", "float32") as server:
        yield server


def leave_anthropic(url: str) -> None:
    with (
        anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client,
        client.messages.stream(model="weft-demo", max_tokens=NUM_TOKENS, messages=ASK) as stream,
    ):
        next(iter(stream))


def leave_ollama(url: str) -> None:
    with ollama.Client(url, timeout=100) as client:
        stream = client.chat("weft-demo", ASK, stream=True, options={"num_predict": NUM_TOKENS})
        next(stream)
        stream.close()


@pytest.mark.parametrize("leave", [leave_anthropic, leave_ollama])
def test_a_client_that_leaves_ends_its_request(endless_server: LiveServer, leave: Callable[[str], None]) -> None:
    before = endless_server.metric("weft:generation_tokens_total")
    leave(endless_server.base_url)
    endless_server.wait_for_metric("weft:num_requests_running", 0)
    assert endless_server.metric("weft:generation_tokens_total") - before < NUM_TOKENS // 2
