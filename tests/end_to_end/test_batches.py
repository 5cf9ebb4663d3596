"""A batch is answered line by line, each once, whatever dies meanwhile."""

import json
import os
import pathlib
import random
import signal
import time
from typing import Any

import openai
import pytest

from tests.end_to_end.conftest import TIMEOUT_S, LiveServer, Serve

NUM_LINES = 300


def sdk(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="k", max_retries=0)


def begin(client: openai.OpenAI, num_lines: int, max_tokens: int) -> str:
    body: dict[str, Any] = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
    lines = [
        {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": {**body, "prompt": f"Line {i}"}}
        for i in range(num_lines)
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h").id


def wait_for_end(client: openai.OpenAI, batch_id: str) -> dict[str, str]:
    """The text of every answer by custom_id."""
    deadline = time.monotonic() + TIMEOUT_S
    while (batch := client.batches.retrieve(batch_id)).status != "completed":
        assert batch.status in ("validating", "in_progress", "finalizing"), batch
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert batch.request_counts is not None and batch.request_counts.failed == 0
    assert batch.output_file_id is not None
    lines = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    answers = {line["custom_id"]: line["response"]["body"]["choices"][0]["text"] for line in lines}
    assert len(answers) == len(lines)
    return answers


def num_answered(journal: pathlib.Path) -> int:
    try:
        return journal.read_bytes().count(b"\n")
    except FileNotFoundError:  # not yet, or no longer: the batch may be over before anybody looks
        return 0


def compare_with_kills(serve: Serve, tmp_path: pathlib.Path, num_kills: int, num_lines: int, max_tokens: int) -> None:
    arguments = ("--data-dir", str(tmp_path / "data"), "--server-processes", "2")
    draw = random.Random(0)
    server = serve(*arguments)
    with sdk(server) as client:
        batch_id = begin(client, num_lines, max_tokens)
    journal = tmp_path / "data" / "batches" / f"{batch_id}.answers"
    for kill in range(num_kills):
        wanted = (kill + draw.random()) * num_lines / (num_kills + 1)
        deadline = time.monotonic() + TIMEOUT_S
        with sdk(server) as client:
            while num_answered(journal) < wanted and client.batches.retrieve(batch_id).status != "completed":
                assert time.monotonic() < deadline
        os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait()
        server = serve(*arguments)
    with sdk(server) as client:
        killed = wait_for_end(client, batch_id)
        undisturbed = wait_for_end(client, begin(client, num_lines, max_tokens))
    assert len(undisturbed) == num_lines
    assert killed == undisturbed


def test_kills_lose_nothing_and_do_nothing_twice(serve: Serve, tmp_path: pathlib.Path) -> None:
    compare_with_kills(serve, tmp_path, num_kills=2, num_lines=NUM_LINES, max_tokens=8)


@pytest.mark.slow
def test_twenty_kills_lose_nothing_and_do_nothing_twice(serve: Serve, tmp_path: pathlib.Path) -> None:
    compare_with_kills(serve, tmp_path, num_kills=20, num_lines=5 * NUM_LINES, max_tokens=16)
