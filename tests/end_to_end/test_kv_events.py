"""`kv_events` as an operator sets it and a router hears it."""

import contextlib
import os
import pathlib
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import msgspec
import pytest
import zmq

from tests.end_to_end.conftest import ENGINE, TIMEOUT_S, LiveServer, Serve

Message = tuple[bytes, int, list[Any]]
Subscribe = Callable[[str, str], "zmq.Socket[bytes]"]


@pytest.fixture
def subscribe() -> Iterator[Subscribe]:
    with zmq.Context() as context, contextlib.ExitStack() as stack:

        def connect(address: str, topic: str) -> "zmq.Socket[bytes]":
            subscriber = stack.enter_context(context.socket(zmq.SUB))
            subscriber.set(zmq.LINGER, 0)
            subscriber.set(zmq.RCVTIMEO, int(TIMEOUT_S * 1000))
            subscriber.set_string(zmq.SUBSCRIBE, topic)
            subscriber.connect(address)
            return subscriber

        yield connect


def receive(subscriber: "zmq.Socket[bytes]") -> Message:
    topic, number, data = subscriber.recv_multipart()
    _, events, rank = msgspec.msgpack.decode(data)
    assert rank == 0 and len(number) == 8
    return topic, int.from_bytes(number, "big"), events


def complete(server: LiveServer, prompt: list[int], **fields: str) -> None:
    body = {"prompt": prompt, "max_tokens": 1, **fields}
    assert httpx.post(f"{server.base_url}/v1/completions", json=body, timeout=TIMEOUT_S).status_code == 200


def test_a_router_hears_what_two_prompts_share(serve: Serve, subscribe: Subscribe, tmp_path: pathlib.Path) -> None:
    address = f"ipc://{tmp_path}/events"
    server = serve("--block-size", "16", "--served-model-name", "one", WEFT_KV_EVENTS=address)
    subscriber = subscribe(address, "kv@")
    shared, own = list(range(10, 42)), list(range(50, 66))
    complete(server, [7] * 40, cache_salt="secret")
    complete(server, [*shared, 5])
    complete(server, [*shared, *own, 5])
    messages = [receive(subscriber) for _ in range(3)]
    assert [(topic.decode(), number) for topic, number, _ in messages] == [
        (f"kv@{socket.gethostname()}@one", number) for number in range(3)
    ]
    cleared, (first,), (second,) = (events for _, _, events in messages)
    assert cleared == [["AllBlocksCleared"]]
    hashes = first[1]
    assert len(hashes) == 2 and first == ["BlockStored", hashes, None, shared, 16, None, "GPU", None]
    assert second == ["BlockStored", second[1], hashes[-1], own, 16, None, "GPU", None]

    os.kill(*server.children(ENGINE), signal.SIGKILL)
    assert receive(subscriber)[1:] == (0, [["AllBlocksCleared"]])


def test_the_topic_may_be_another(serve: Serve, subscribe: Subscribe, tmp_path: pathlib.Path) -> None:
    address = f"ipc://{tmp_path}/events"
    serve(WEFT_KV_EVENTS=address, WEFT_KV_EVENTS_TOPIC="kv@pod@model")
    assert receive(subscribe(address, "")) == (b"kv@pod@model", 0, [["AllBlocksCleared"]])


def ask(replay: "zmq.Socket[bytes]", *request: bytes) -> list[tuple[int, bytes]]:
    """What is answered to a request for missed messages, up to the end marker."""
    replay.send_multipart(request)
    answers: list[tuple[int, bytes]] = []
    while not answers or answers[-1][0] != -1:
        empty, number, data = replay.recv_multipart()
        assert empty == b"" and len(number) == 8
        answers.append((int.from_bytes(number, "big", signed=True), data))
    assert answers.pop() == (-1, b"")
    return answers


def test_a_late_subscriber_asks_for_what_it_missed(serve: Serve, subscribe: Subscribe, tmp_path: pathlib.Path) -> None:
    """As vLLM answers it; requests of another form are ignored."""
    address, replay_address = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    environment = {"WEFT_KV_EVENTS_REPLAY": replay_address, "WEFT_KV_EVENTS_BUFFER": "3"}
    server = serve("--block-size", "16", WEFT_KV_EVENTS=address, **environment)
    early = subscribe(address, "")
    prompts = [[10 + i] * 16 for i in range(3)]
    for prompt in prompts:
        complete(server, [*prompt, 5])
    heard = [receive(early) for _ in range(4)]
    with zmq.Context() as context, context.socket(zmq.DEALER) as replay:
        replay.set(zmq.LINGER, 0)
        replay.set(zmq.RCVTIMEO, int(TIMEOUT_S * 1000))
        replay.connect(replay_address)
        for wrong in ((b"",), (b"", b"2"), (b"", b"", bytes(8)), (bytes(8),)):
            replay.send_multipart(wrong)
        missed = ask(replay, b"", (2).to_bytes(8, "big"))
        assert [(number, msgspec.msgpack.decode(data)[1]) for number, data in missed] == [
            (number, events) for _, number, events in heard[2:]
        ]
        assert [number for number, _ in ask(replay, b"", bytes(8))] == [1, 2, 3], "of four messages three are kept"
        assert ask(replay, b"", (4).to_bytes(8, "big")) == []
