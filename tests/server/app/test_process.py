"""A server process as the supervisor starts it, with a small engine that emits a token every 20 ms."""

import asyncio
import contextlib
import http.client
import json
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from weft.engine.wire.messages import (
    SOCKET_NAME,
    STATUS_NAME,
    AbortRequest,
    Accepted,
    AddRequest,
    EngineInfo,
    FinishReason,
    FrameReader,
    FromEngine,
    StepOutput,
    TokensOutput,
    decode_to_engine,
    encode,
)
from weft.engine.wire.status_page import Status, StatusPage
from weft.server.app.process import Drain
from weft.server.http.limits import LONG_SIZE
from weft.server.settings import Settings
from weft.server.supervise import supervisor
from weft.server.supervise.runtime_folder import METRICS_NAME, engine_folder

TOKEN_S = 0.02
TIMEOUT_S = 120.0
"""Of what is waited for; only a failure takes so long."""

Start = Callable[..., "ServerProcess"]
INFO = EngineInfo("e", "Qwen3ForCausalLM", 256, 4096, (), "cpu", "float32", "sdpa", 16, 256, 8, 512)


class SmallEngine(threading.Thread):
    """Serves one connection: every request gets `max_tokens` times the same id."""

    def __init__(self, runtime_dir: pathlib.Path) -> None:
        super().__init__(daemon=True)
        self.heard: list[AddRequest | AbortRequest] = []
        self.may_end = threading.Event()  # before which no request gets its last token
        self.may_end.set()
        self._listener = socket.socket(socket.AF_UNIX)
        folder = engine_folder(runtime_dir, 0)
        folder.mkdir()
        self._listener.bind(str(folder / SOCKET_NAME))
        self._listener.listen()
        self._page = StatusPage(folder / STATUS_NAME)
        self._page.write(Status(epoch_id=1, is_ready=1))

    def run(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # closed: no server came
            return
        with connection, contextlib.suppress(ConnectionResetError):  # a server that leaves what it has not read
            self._connection = connection
            self._say(INFO)
            frames = FrameReader()
            while data := connection.recv(65536):
                for body in frames.feed(data):
                    message = decode_to_engine(body)
                    self.heard.append(message)
                    if isinstance(message, AddRequest):
                        threading.Thread(target=self._answer, args=(message,), daemon=True).start()

    def _answer(self, request: AddRequest) -> None:
        self._say(Accepted(request.request_id))
        last = request.sampling_params.max_tokens
        assert last is not None
        for number in range(1, last + 1):
            time.sleep(TOKEN_S)
            if number == last:
                self.may_end.wait()
            ended = FinishReason.LENGTH if number == last else None
            try:
                self._say(StepOutput([TokensOutput(request.request_id, 0, [10], ended, num_cached_tokens=0)]))
            except OSError:  # the server is gone, and with it the request
                return

    def _say(self, message: FromEngine) -> None:
        self._connection.sendall(encode(message))

    def close(self) -> None:
        self._listener.close()
        self.join(10)
        self._page.close()


def write_checkpoint(folder: pathlib.Path) -> pathlib.Path:
    folder.mkdir()
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text("{}")
    return folder


class ServerProcess:
    """A running `python -m weft.server.app.process`."""

    def __init__(self, runtime_dir: pathlib.Path, model: pathlib.Path, drain_timeout_s: float = TIMEOUT_S) -> None:
        (runtime_dir / METRICS_NAME).mkdir(exist_ok=True)
        settings = Settings(served_model_name=("m",), drain_timeout_s=drain_timeout_s, model=str(model))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
            self.process = subprocess.Popen(
                [sys.executable, "-m", "weft.server.app.process", str(runtime_dir), str(listener.fileno())],
                pass_fds=(listener.fileno(),),
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        assert self.process.stdin is not None
        self.process.stdin.write(settings.model_dump_json())
        self.process.stdin.close()
        self.process.stdin = None  # or `communicate` would flush it
        self.ready_file = supervisor.ready_file(runtime_dir, self.process.pid)
        self._open = contextlib.ExitStack()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()
        self._open.close()

    def wait_ready(self) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not (self.ready_file.exists() and self.get_ready() == 200):
            assert self.process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def wait_draining(self) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while self.get_ready() != 503:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def get_ready(self) -> int:
        return self._request("GET", "/ready", "").status

    def ask(self, num_tokens: int, stream: bool) -> http.client.HTTPResponse:
        body = {"model": "m", "prompt": "x", "max_tokens": num_tokens, "stream": stream}
        return self._request("POST", "/v1/completions", json.dumps(body))

    def _request(self, method: str, path: str, body: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)
        self._open.callback(connection.close)
        connection.request(method, path, body, {"content-type": "application/json"})
        response = connection.getresponse()
        self._open.callback(response.close)
        return response

    def hang_up(self) -> None:
        self._open.close()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait(self) -> tuple[int, str]:
        """The exit code, and the log without the line about formats."""
        _, errors = self.process.communicate(timeout=TIMEOUT_S)
        return self.process.returncode, "".join(line for line in errors.splitlines(True) if "tool calls:" not in line)


@pytest.fixture
def engine(tmp_path: pathlib.Path) -> Iterator[SmallEngine]:
    engine = SmallEngine(tmp_path)
    engine.start()
    yield engine
    engine.close()


@pytest.fixture
def start(tmp_path: pathlib.Path) -> Iterator[Start]:
    servers: list[ServerProcess] = []

    def start(drain_timeout_s: float = TIMEOUT_S) -> ServerProcess:
        servers.append(ServerProcess(tmp_path, write_checkpoint(tmp_path / "m"), drain_timeout_s))
        servers[-1].wait_ready()
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def read_events(response: http.client.HTTPResponse) -> list[str]:
    lines = response.read().decode().split("\n")
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


def test_drain_lets_streams_end_and_refuses_what_is_new(engine: SmallEngine, start: Start) -> None:
    """A SIGTERM that uvicorn or sse-starlette see would cut every stream at once."""
    server = start()
    engine.may_end.clear()
    stream = server.ask(30, stream=True)
    assert stream.status == 200
    server.stop()
    server.process.send_signal(signal.SIGINT)  # a terminal's; it means nothing here
    server.wait_draining()
    server.stop()  # a service manager's, which went to the whole group
    time.sleep(0.7)  # longer than the half second after which sse-starlette would notice
    refused = server.ask(1, stream=False)
    assert (refused.status, refused.headers["connection"]) == (503, "close")
    assert json.loads(refused.read())["error"]["code"] == "shutting_down"
    assert server.get_ready() == 503
    engine.may_end.set()
    events = read_events(stream)
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert sum(len(choice["text"]) for chunk in chunks for choice in chunk["choices"]) == 30
    assert server.wait() == (0, "")


def test_idle_server_ends_at_once(engine: SmallEngine, start: Start) -> None:
    server = start(drain_timeout_s=10 * TIMEOUT_S)
    server.stop()
    assert server.wait() == (0, "")


def test_bodies_that_are_to_come_do_not_hold_up_the_end(engine: SmallEngine, start: Start) -> None:
    """One unfinished body made SIGTERM wait out the drain."""
    server = start(drain_timeout_s=10 * TIMEOUT_S)
    lines = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Expect: 100-continue", "Content-Length: 100", "", ""]
    with contextlib.ExitStack() as stack:
        connections = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), TIMEOUT_S)) for _ in range(3)
        ]
        for connection in connections:
            connection.sendall("\r\n".join(lines).encode())
            assert connection.recv(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
            connection.sendall(b"{")
        server.stop()
        for connection in connections:
            answer = b"".join(iter(lambda connection=connection: connection.recv(65536), b""))  # type: ignore[misc]
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "shutting_down"
    assert server.wait() == (0, "")


def test_what_outlasts_the_drain_is_told_so(engine: SmallEngine, start: Start) -> None:
    server = start(drain_timeout_s=0.3)
    stream = server.ask(4000, stream=True)
    server.stop()
    events = read_events(stream)
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["error"]["code"] == "shutting_down"
    code, errors = server.wait()
    assert code == 0
    assert errors.count("\n") == 1
    assert errors.endswith("Cutting requests that did not finish in time num_requests=1\n")


def test_what_the_drain_cuts_before_the_engine_has_it_is_told_so_too(site: Any) -> None:
    """Clients whose text was being encoded saw a closed connection instead of an error."""
    encoded, may_end = [], threading.Event()

    def encode(text: str, *_: object) -> list[int]:
        encoded.append(text)
        may_end.wait(TIMEOUT_S)
        return [1]

    site.tokenizer.encode = encode

    async def main() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(site.app), base_url="http://localhost") as client:
            asking = [
                asyncio.create_task(client.post("/v1/completions", json={"prompt": "a" * LONG_SIZE})) for _ in range(3)
            ]
            while len(encoded) < 2:  # and one waits
                await asyncio.sleep(0.001)
            server = SimpleNamespace(stop_receiving=lambda: None, should_exit=False)
            engine_client = SimpleNamespace(disconnect=partial(asyncio.sleep, 0))
            Drain(server, site.app.state.lifecycle, [engine_client], 0.0).on_signal()  # type: ignore[arg-type, list-item]
            await asyncio.wait(asking, timeout=TIMEOUT_S / 2)
            may_end.set()
            return await asyncio.gather(*asking)

    for reply in asyncio.run(main()):
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "shutting_down")
        assert reply.headers["connection"] == "close"


def test_client_that_leaves_is_aborted(engine: SmallEngine, start: Start) -> None:
    server = start()
    stream = server.ask(4000, stream=True)
    assert stream.readline().startswith(b"data: ")
    server.hang_up()
    deadline = time.monotonic() + TIMEOUT_S
    while not any(isinstance(message, AbortRequest) for message in engine.heard):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    server.stop()
    assert server.wait()[0] == 0


def test_checkpoint_without_tokenizer_is_one_line_and_exit_code_2(tmp_path: pathlib.Path) -> None:
    (tmp_path / "m").mkdir()
    server = ServerProcess(tmp_path, tmp_path / "m")
    code, errors = server.wait()
    assert code == supervisor.EXIT_CANNOT_START
    assert errors.startswith("weft: error: ")
    assert "tokenizer.json" in errors
    assert errors.count("\n") == 1


def test_server_process_imports_no_tensor_library() -> None:
    code = "import sys, weft.server.app.process; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=TIMEOUT_S)
    assert done.stdout == "[]\n"
