"""The README's examples, as they stand there, against a live server."""

import pathlib
import re
import shutil
import subprocess
import sys

import msgspec
import pytest

from tests.end_to_end.conftest import TIMEOUT_S, LiveServer

README = (pathlib.Path(__file__).parent.parent.parent / "README.md").read_text(encoding="utf-8")
ADDRESS = "http://127.0.0.1:8000"
ANSWER = "3 + 4 = 7."


def example(language: str, word: str, server: LiveServer) -> str:
    """The one block in that language that contains the word, aimed at the live server."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    (block,) = (block for block in blocks if word in block)
    assert ADDRESS in block
    return str(block).replace(ADDRESS, server.base_url)


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S).stdout


def test_the_sdk_example_prints_the_answer(live_server: LiveServer) -> None:
    assert run(sys.executable, "-W", "error", "-c", example("python", "OpenAI(", live_server)) == ANSWER


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_curl_line_streams_the_answer(live_server: LiveServer) -> None:
    events = run("sh", "-c", example("sh", "curl -N", live_server)).strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    chunks = [msgspec.json.decode(event.removeprefix("data: ")) for event in events[:-1]]
    deltas = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert len(chunks) > 1, "it did not stream"  # how many tokens come with a chunk is a matter of load
    assert "".join(deltas).startswith("3 + 4")
