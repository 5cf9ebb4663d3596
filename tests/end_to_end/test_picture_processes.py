"""The processes that read pictures in a real server: one for each server process, and what is left of them.

The model is loaded on demand, so it can be unloaded.
"""

import contextlib
import itertools
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from PIL import Image

from tests.end_to_end.conftest import SERVER, TIMEOUT_S, LiveServer, serving
from tests.end_to_end.test_pictures import part, text
from tests.picture_checkpoints import picture, write_llava

READER = b"weft.server.pictures.child"
ADMIN = {"authorization": "Bearer root"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("seeing")
    write_llava(folder / "llava")
    models = {"m": {"model": str(folder / "llava"), "load": "on-demand", "pictures": True}}
    options = {"admin_key": "root", "dtype": "float32", "kv_cache_memory": "8MiB", "server_processes": 2}
    (folder / "weft.yaml").write_text(json.dumps({"models": models, "data_dir": str(folder / "data"), **options}))
    with serving(folder / "log", "--config", str(folder / "weft.yaml")) as server:
        yield server


def eventually(claim: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not claim():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def readers(server: LiveServer) -> dict[int, int]:
    """The process that reads pictures, by the server process that it serves."""
    found = {}
    for pid in server.children(SERVER):
        with contextlib.suppress(OSError):
            children = [each.read_text() for each in Path(f"/proc/{pid}/task").glob("*/children")]
            for child in " ".join(children).split():
                if READER in Path(f"/proc/{child}/cmdline").read_bytes():
                    found[pid] = int(child)
    return found


def pictures_of(pid: int) -> set[int]:
    """The inodes of the pictures that a process has open."""
    found = set[int]()
    with contextlib.suppress(OSError):
        for each in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(each).startswith("/memfd:weft-picture"):
                    found.add(each.stat().st_ino)
    return found


def ask(server: LiveServer, *content: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The answer to a chat, over a connection of its own."""
    body = {"model": "m", "messages": [{"role": "user", "content": [*content]}], "temperature": 0, "max_tokens": 4}
    reply = httpx.post(f"{server.base_url}/v1/chat/completions", json={**body, **more}, timeout=TIMEOUT_S)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def num_cached(answer: dict[str, Any]) -> int:
    num: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return num


def test_the_prefix_cache_knows_a_picture_whoever_read_it(server: LiveServer) -> None:
    asked = part(picture(1, 60, 40)), text("what is to be seen here? " * 6)
    first = ask(server, *asked)
    deadline = time.monotonic() + TIMEOUT_S
    while len(readers(server)) < 2:
        again = ask(server, *asked)
        assert again["choices"][0]["message"] == first["choices"][0]["message"] and num_cached(again) >= 64
        assert time.monotonic() < deadline


def test_a_killed_reader_is_replaced(server: LiveServer) -> None:
    ask(server, part(picture(2, 60, 40)))
    pid, killed = next(iter(readers(server).items()))
    os.kill(killed, signal.SIGKILL)
    numbers = itertools.count(3)

    def is_replaced() -> bool:
        ask(server, part(picture(next(numbers), 60, 40)))
        return readers(server).get(pid) not in (None, killed)

    eventually(is_replaced, "another one reads for its server process")
    assert "the process that reads pictures ended (-9)" in server.log.read_text()


def test_a_client_that_leaves_has_nothing_more_read(server: LiveServer) -> None:
    """What was read until then is only kept: it makes room for others, who are answered."""
    ask(server, part(picture(1, 60, 40)))  # a process that reads is there
    shown = [part(Image.new("RGB", (4000, 4000), (i, 9, 9))) for i in range(24)]
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": shown}], "max_tokens": 1}).encode()
    before = {pid: pictures_of(pid) for pid in server.children(SERVER)}

    def num_more() -> int:
        return sum(len(pictures_of(pid) - before[pid]) for pid in before)

    with socket.create_connection(("127.0.0.1", server.port)) as client:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        client.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        eventually(lambda: num_more() >= 2, "it is read")
    for i in range(2):
        ask(server, part(picture(1000 + i, 60, 40)))  # behind whatever would still wait there
    time.sleep(5)
    assert num_more() < 24


def test_pictures_may_be_in_stored_turns_and_in_batches(server: LiveServer) -> None:
    shown = picture(30, 60, 40)
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="x", max_retries=0) as client:
        seen: Any = {"type": "input_image", "image_url": part(shown)["image_url"]["url"], "detail": "auto"}
        first: Any = {"role": "user", "content": [seen, {"type": "input_text", "text": "what?"}]}
        options: Any = {"model": "m", "temperature": 0, "max_output_tokens": 4}
        stored = client.responses.create(input=[first], **options)
        second = client.responses.create(input="and now?", previous_response_id=stored.id, **options)
        answer = {"role": "assistant", "content": stored.output_text}
        whole = client.responses.create(input=[first, answer, {"role": "user", "content": "and now?"}], **options)
        assert second.usage is not None and whole.usage is not None and stored.usage is not None
        assert second.output_text == whole.output_text
        assert second.usage.input_tokens == whole.usage.input_tokens > stored.usage.input_tokens > 9
        ask_body = {"model": "m", "messages": [{"role": "user", "content": [part(shown), text("what?")]}]}
        ask_body |= {"temperature": 0, "max_tokens": 4}
        path = "/v1/chat/completions"
        line = json.dumps({"custom_id": "a", "method": "POST", "url": path, "body": ask_body}).encode()
        file = client.files.create(file=("in.jsonl", line), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        eventually(lambda: client.batches.retrieve(batch.id).status == "completed", "the batch ends")
        output = client.batches.retrieve(batch.id).output_file_id
        assert output is not None
        answered = json.loads(client.files.content(output).text)["response"]["body"]
    direct = ask(server, part(shown), text("what?"))
    assert answered["choices"][0]["message"]["content"] == direct["choices"][0]["message"]["content"]
    assert answered["usage"]["prompt_tokens"] == direct["usage"]["prompt_tokens"]


def test_a_killed_server_process_leaves_no_picture(server: LiveServer) -> None:
    eventually(lambda: ask(server, part(picture(40, 60, 40))) and len(readers(server)) == 2, "both read")
    pid, reader = next(iter(readers(server).items()))
    inodes = pictures_of(pid)
    assert inodes
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: not Path(f"/proc/{reader}").exists(), "its reader ends")
    others = [int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit()]
    assert not inodes & {inode for other in others for inode in pictures_of(other)}
    eventually(lambda: len(server.children(SERVER)) == 2, "it is replaced")
    ask(server, part(picture(41, 60, 40)))


def test_readers_end_with_the_model_and_with_the_server(server: LiveServer) -> None:
    ask(server, part(picture(50, 60, 40)))
    running, servers = readers(server), server.children(SERVER)
    assert running
    url = f"{server.base_url}/v1/models/unload"
    assert httpx.post(url, json={"model": "m"}, headers=ADMIN, timeout=TIMEOUT_S).status_code == 200
    eventually(lambda: not readers(server), "they end")
    assert server.children(SERVER) == servers and not any(map(pictures_of, servers))
    assert not any(Path(f"/proc/{pid}").exists() for pid in running.values())
    ask(server, part(picture(50, 60, 40)))
    (pid, *_) = readers(server).values()
    assert server.stop() == 0
    eventually(lambda: not Path(f"/proc/{pid}").exists(), "it ends")
