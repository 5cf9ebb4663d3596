"""The load generator reads what servers send, and fails rather than measure something else."""

import json
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.compare import servers
from benchmarks.compare.load import LoadError, StreamParser, load
from benchmarks.compare.servers import Server
from benchmarks.compare.workloads import WORKLOADS, bodies

OK = b"HTTP/1.1 200 OK\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENTS = (
    b'data: {"choices":[{"text":"a"}],"usage":null}\n\n',
    b": ping\n\n",
    b'data: {"choices": [{"text":"\\"usage\\":{ \\n\\ndata: [DONE]"}]}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":3}}\n\n',
    b"data: [DONE]\n\n",
)


def in_chunks(*parts: bytes) -> bytes:
    return b"".join(b"%X;extension\r\n%s\r\n" % (len(part), part) for part in (*parts, b""))


def parse(*pieces: bytes) -> StreamParser:
    parser = StreamParser()
    for now, piece in enumerate(pieces):
        parser.feed(piece, float(now))
    return parser


@pytest.mark.parametrize(
    "reply",
    [
        CHUNKED + in_chunks(*EVENTS),
        CHUNKED + in_chunks(b"".join(EVENTS)),
        CHUNKED + in_chunks(*(event.replace(b"\n\n", b"\r\n\r\n") for event in EVENTS)),
        OK + b"".join(EVENTS),
    ],
    ids=["chunk per event", "one chunk", "CRLF", "not chunked"],
)
def test_a_reply_reads_the_same_wherever_it_is_cut(reply: bytes) -> None:
    for cut in range(1, len(reply)):
        parser = parse(reply[:cut], reply[cut:])
        assert (len(parser.event_times), parser.num_output_tokens, parser.is_finished) == (2, 3, True)
    bytewise = parse(*(reply[at : at + 1] for at in range(len(reply))))
    assert (len(bytewise.event_times), bytewise.num_output_tokens, bytewise.is_finished) == (2, 3, True)


def test_events_have_the_time_at_which_they_were_whole() -> None:
    reply = in_chunks(EVENTS[0], EVENTS[2])
    half = reply.index(b"text")
    assert parse(CHUNKED, reply[:half], reply[half:-30], reply[-30:]).event_times == [2.0, 3.0]


def test_usage_may_come_with_the_last_choice() -> None:
    last = b'data: {"choices":[{"text":""}],"usage":{"completion_tokens":7}}\n\n'
    parser = parse(OK, EVENTS[0], last)
    assert (parser.event_times, parser.num_output_tokens) == ([1.0, 2.0], 7)


def test_an_error_is_shown_as_the_server_put_it() -> None:
    with pytest.raises(LoadError, match="503 service unavailable: the queue is full"):
        parse(b"HTTP/1.1 503 Service Unavailable\r\n\r\nthe queue is full")
    with pytest.raises(LoadError, match="engine died"):
        parse(OK, EVENTS[0], b'data: {"error": {"message": "engine died"}}\n\n')


def body(num_tokens: int, **more: int) -> bytes:
    return json.dumps({"max_tokens": num_tokens, **more}).encode()


def test_load_sends_all_and_keeps_to_the_concurrency(fake: Callable[..., Server], tmp_path: Path) -> None:
    done: list[int] = []
    with servers.running(fake(), WORKLOADS[:1], tmp_path / "log", 300) as server:
        streams = load(server.url, [body(5, until_at_once=3)] * 7, 3, on_done=lambda: done.append(1))
        status, most = servers.get(server.url, "/most_at_once")
        with pytest.raises(LoadError, match=r"a stream had \d+ events after 0\.2 s"):
            load(server.url, [body(10**6)] * 2, 2, timeout_s=0.2)
    assert [len(stream.times) for stream in streams] == [5] * 7
    assert [stream.num_output_tokens for stream in streams] == [5] * 7
    assert all(stream.sent_at < stream.times[0] and stream.times == sorted(stream.times) for stream in streams)
    assert (status, json.loads(most)) == (200, {"most": 3})
    assert len(done) == 7
    with pytest.raises(LoadError, match="refused"):
        load(server.url, [body(5)], 1)


@contextmanager
def answering(reply: bytes) -> Iterator[str]:
    """A server that answers every request with these bytes, then closes."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(65536)
            self.request.sendall(reply)

    with socketserver.TCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (OK + EVENTS[0], "the stream broke off after 1 events: end of file"),
        (b"", "the stream broke off after 0 events"),
        (CHUNKED + b"zz\r\nnothing\r\n", "invalid literal"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\nno such model", "400 bad request: no such model"),
    ],
)
def test_a_reply_that_is_no_whole_stream_fails_the_load(reply: bytes, message: str) -> None:
    with answering(reply) as url, pytest.raises(LoadError, match=message):
        load(url, [body(5)] * 2, 1)


def test_bodies_repeat_for_a_seed_and_share_only_the_prefix() -> None:
    workload = next(workload for workload in WORKLOADS if workload.key == "C")
    first = bodies(workload, "m", 2000, seed=1, run=1)
    assert first == bodies(workload, "m", 2000, seed=1, run=1)
    assert first != bodies(workload, "m", 2000, seed=2, run=1)
    prompts = [json.loads(text)["prompt"] for text in (*first.warm_up, *first.measured)]
    other = json.loads(bodies(workload, "m", 2000, seed=1, run=2).measured[0])["prompt"]
    assert [len(prompt) for prompt in prompts] == [1088] * 26
    assert len({tuple(prompt[:1024]) for prompt in prompts}) == 1
    assert len({tuple(prompt[1024:]) for prompt in prompts}) == 26
    assert other[:1024] != prompts[0][:1024]
    assert all(300 <= token_id < 1700 for prompt in prompts for token_id in prompt)


def test_bodies_ask_for_greedy_streams_of_a_fixed_length() -> None:
    sent = json.loads(bodies(WORKLOADS[0], "name", 2000, seed=0, run=1).measured[0])
    assert len(sent.pop("prompt")) == 128
    assert sent == {
        "model": "name",
        "max_tokens": 64,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
