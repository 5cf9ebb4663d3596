"""What users see when processes die, drain and come back."""

import os
import pathlib
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.end_to_end.conftest import ENGINE, SERVER, TIMEOUT_S, LiveServer, Serve, serving
from weft import server
from weft.server.supervise.supervisor import EXIT_FORCED, REPEAT_S

MODEL = "weft-demo"
LONG: dict[str, Any] = {"prompt": "B" * 30, "max_tokens": 98_000, "ignore_eos": True, "temperature": 0}
"""For a server of the long model: it does not end before the test does."""


def complete(server: LiveServer, **body: Any) -> httpx.Response:
    body = {"model": MODEL, "prompt": [20, 21], "max_tokens": 3} | body
    return httpx.post(f"{server.base_url}/v1/completions", json=body, timeout=TIMEOUT_S)


class Stream:
    """A streamed completion in a thread of its own."""

    def __init__(self, server: LiveServer, **body: Any) -> None:
        self.text = ""
        self.is_cut = False
        self._body = {"model": MODEL, "stream": True} | body
        self._url = f"{server.base_url}/v1/completions"
        self.first = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        assert self.first.wait(TIMEOUT_S), "no first chunk"

    def _run(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=TIMEOUT_S) as reply:
                for chunk in reply.iter_text():
                    self.text += chunk
                    self.first.set()
        except httpx.TransportError:
            self.is_cut = True

    def wait(self) -> str:
        self.thread.join(TIMEOUT_S)
        assert not self.thread.is_alive(), "the stream hangs"
        assert not self.is_cut, "the connection was cut"
        return self.text


def eventually(claim: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not claim():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def kill_engine(server: LiveServer) -> None:
    """Kill the engine, and stop the supervisor, which would start another one: `let_restart` lets it."""
    server.process.send_signal(signal.SIGSTOP)
    os.kill(server.children(ENGINE)[0], signal.SIGKILL)


def let_restart(server: LiveServer) -> None:
    server.process.send_signal(signal.SIGCONT)


def wait_until_serving(server: LiveServer) -> None:
    server.wait_ready()
    assert complete(server).status_code == 200


@pytest.fixture(scope="module")
def long_server(long_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """One whose engines die; each test leaves it serving."""
    with serving(tmp_path_factory.mktemp("long") / "log", long_model, WEFT_DRAIN_TIMEOUT_S="1") as server:
        yield server
        assert server.stop() == 0


@pytest.fixture(scope="module")
def narrow_server(long_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """One request runs, and two may wait."""
    folder = tmp_path_factory.mktemp("narrow")
    with serving(folder / "log", long_model, "--max-num-seqs", "1", WEFT_MAX_NUM_WAITING="2") as server:
        yield server


def test_an_engine_that_dies_fails_its_requests_at_once_and_comes_back(long_server: LiveServer) -> None:
    server = long_server
    (engine,) = server.children(ENGINE)
    stream = Stream(server, **LONG)
    kill_engine(server)
    text = stream.wait()
    assert '"error"' in text
    assert text.endswith("data: [DONE]\n\n")
    assert server.get("/ready").status_code == 503
    refused = complete(server)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "engine_restarting"
    assert float(refused.headers["retry-after"]) > 0
    let_restart(server)
    wait_until_serving(server)
    assert server.children(ENGINE) != [engine]


def test_requests_that_had_no_token_yet_are_told_and_a_full_queue_is_said(narrow_server: LiveServer) -> None:
    """Accepted, but still waiting when the engine dies; one more was refused."""
    server = narrow_server
    running = Stream(server, **LONG)
    replies: list[httpx.Response] = []
    waiting = [
        threading.Thread(target=lambda stream=stream: replies.append(complete(server, stream=stream)))
        for stream in (False, True)
    ]
    for thread in waiting:
        thread.start()
    server.wait_for_metric("weft:num_requests_waiting", 2)
    refused = complete(server, prompt=[41])
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "queue_full"
    assert "retry-after" in refused.headers
    assert running.thread.is_alive()
    kill_engine(server)
    for thread in waiting:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
    assert '"error"' in running.wait()
    for reply in replies:
        if reply.headers["content-type"].startswith("text/event-stream"):
            assert '"code":"engine_restarting"' in reply.text
            assert reply.text.endswith("data: [DONE]\n\n")
        else:
            assert reply.status_code == 503
            assert reply.json()["error"]["code"] == "engine_restarting"
    assert len(replies) == 2


@pytest.mark.parametrize("has_work", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_an_engine_that_hangs_is_not_healthy(serve: Serve, has_work: bool) -> None:
    """One that hung without work looked idle for ever, even while a request waited for its answer."""
    server = serve(WEFT_STALL_TIMEOUT_S="5")
    (engine,) = server.children(ENGINE)
    if has_work:
        stream = Stream(server, **(LONG | {"max_tokens": 500}))
    server.process.send_signal(signal.SIGSTOP)  # the supervisor would end it
    os.kill(engine, signal.SIGSTOP)
    wait_for_health(server, 503)
    assert server.get("/ready").status_code == 503
    refused = complete(server)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_restarting")
    assert float(refused.headers["retry-after"]) > 0
    os.kill(engine, signal.SIGCONT)
    wait_for_health(server, 200)
    server.process.send_signal(signal.SIGCONT)
    if has_work:
        assert '"finish_reason":"length"' in stream.wait()
    assert complete(server).status_code == 200
    assert server.children(ENGINE) == [engine]


def wait_for_health(server: LiveServer, status: int) -> None:
    eventually(lambda: server.get("/health").status_code == status, f"/health does not turn {status}")


def test_nobody_works_while_there_is_nothing_to_do(serve: Serve) -> None:
    server = serve()
    assert complete(server).status_code == 200
    pids = [
        server.process.pid,
        *server.children(ENGINE),
        *server.children(SERVER),
    ]
    # The web server looks at the clock ten times a second; the engine may first prepare what it has time for now.
    eventually(lambda: is_quiet(pids), "somebody works")


def is_quiet(pids: list[int]) -> bool:
    """Whether processes rest for three seconds: they neither compute nor wake again and again."""
    start_time, num_wakeups, seconds = time.monotonic(), wakeups(pids), cpu_seconds(pids)
    time.sleep(3)
    elapsed_s = time.monotonic() - start_time
    return wakeups(pids) - num_wakeups <= 30 * elapsed_s and cpu_seconds(pids) - seconds <= 0.1 * elapsed_s


def wakeups(pids: list[int]) -> int:
    """How often threads of processes have gone to sleep so far."""
    files = [file for pid in pids for file in pathlib.Path(f"/proc/{pid}/task").glob("*/status")]
    lines = [line for file in files for line in file.read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))


def cpu_seconds(pids: list[int]) -> float:
    """Time that processes have computed so far, all their threads together."""
    fields = [pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(user) + int(system) for *_, user, system in (f[:13] for f in fields)) / os.sysconf("SC_CLK_TCK")


def test_a_request_that_kills_the_engine_alone_is_refused(long_server: LiveServer) -> None:
    """It crashed twice while it ran: first as one of two suspects, then alone. Its neighbour is served.

    An operator may let it run again.
    """
    server = long_server
    neighbour = LONG | {"prompt": "e" * 30}
    poison = [Stream(server, **LONG), Stream(server, **neighbour)]
    end_engine(server, signal.SIGSEGV, *poison)
    end_engine(server, signal.SIGABRT, Stream(server, **LONG))
    refused = complete(server, **LONG)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "poison_request"
    assert refused.headers["x-should-retry"] == "false"
    assert complete(server, **(neighbour | {"max_tokens": 3})).status_code == 200
    server.process.send_signal(signal.SIGUSR1)
    eventually(lambda: "forget which requests" in server.log.read_text(), "nothing is forgotten")
    assert is_served(Stream(server, **LONG))


def test_a_request_whose_engine_is_killed_from_outside_is_no_poison(long_server: LiveServer) -> None:
    """It was refused for ever when the out-of-memory killer had come twice."""
    server, other = long_server, LONG | {"prompt": "h" * 30}
    for _ in range(2):
        end_engine(server, signal.SIGKILL, Stream(server, **other))
    assert is_served(Stream(server, **other))


def is_served(stream: Stream) -> bool:
    """Whether what has come is an answer, and no refusal."""
    return stream.text.startswith("data: {") and '"error"' not in stream.text


def end_engine(server: LiveServer, signum: int, *running: Stream) -> None:
    """Let a signal end the engine while streams run, and wait for the next one."""
    os.kill(server.children(ENGINE)[0], signum)
    for stream in running:
        assert '"error"' in stream.wait()
    server.wait_ready()


def test_a_server_process_that_dies_is_replaced_and_its_requests_leave_the_engine(
    serve: Serve, long_model: str
) -> None:
    server = serve(long_model, "--server-processes", "2")
    assert len(server.children(SERVER)) == 2
    stream = Stream(server, **LONG)
    server.wait_for_metric("weft:num_requests_running", 1)
    for pid in server.children(SERVER):
        os.kill(pid, signal.SIGKILL)
    stream.thread.join(TIMEOUT_S)
    assert stream.is_cut
    eventually(lambda: len(server.children(SERVER)) == 2, "they are not replaced")
    wait_until_serving(server)
    server.wait_for_metric("weft:num_requests_running", 0)
    server.wait_for_metric("weft:kv_cache_usage_perc", 0)


def test_ready_means_that_every_server_process_serves(serve: Serve) -> None:
    """A connection goes to any of them, and one of them meets the engine first."""
    server = serve("--server-processes", "4")
    assert [complete(server).status_code for _ in range(16)] == [200] * 16


def test_sigterm_drains(serve: Serve) -> None:
    server = serve(WEFT_DRAIN_TIMEOUT_S=str(TIMEOUT_S))
    (engine,) = server.children(ENGINE)
    stream = stopped_stream(server, engine)
    server.process.send_signal(signal.SIGTERM)
    eventually(lambda: server.get("/ready").status_code == 503, "it does not drain")
    refused = complete(server)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "shutting_down"
    assert refused.headers["connection"] == "close"
    os.kill(engine, signal.SIGCONT)
    text = stream.wait()
    assert text.endswith("data: [DONE]\n\n")
    assert '"finish_reason":"length"' in text
    assert server.process.wait(TIMEOUT_S) == 0


def stopped_stream(server: LiveServer, engine: int) -> Stream:
    """One that runs, and will end soon, but not before its engine is let go on."""
    while True:
        stream = Stream(server, **(LONG | {"max_tokens": 400}))
        os.kill(engine, signal.SIGSTOP)
        if server.metric("weft:num_requests_running") == 1:
            return stream
        os.kill(engine, signal.SIGCONT)  # it had ended already


def test_a_second_signal_forces(serve: Serve, long_model: str) -> None:
    server = serve(long_model, WEFT_DRAIN_TIMEOUT_S=str(TIMEOUT_S))
    stream = Stream(server, **LONG)
    server.process.send_signal(signal.SIGINT)
    eventually(lambda: "Draining" in server.log.read_text(), "it does not drain")
    time.sleep(REPEAT_S)
    assert server.process.poll() is None
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(TIMEOUT_S) == EXIT_FORCED
    text = stream.wait()
    assert '"finish_reason":"length"' not in text
    assert '"code":"shutting_down"' in text
    assert text.endswith("data: [DONE]\n\n")


def test_the_engine_dies_with_the_supervisor(serve: Serve) -> None:
    server = serve()
    children = server.children(ENGINE) + server.children(SERVER)
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.wait(TIMEOUT_S)
    eventually(
        lambda: not any(os.path.exists(f"/proc/{pid}/exe") for pid in children), "children outlive the supervisor"
    )


def test_a_model_that_cannot_be_loaded_ends_with_one_line(serve: Serve, tmp_path: pathlib.Path) -> None:
    demo = pathlib.Path(server.__file__).parent / "demo_model"
    shutil.copy(demo / "tokenizer.json", tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["BartForQuestionAnswering"], "model_type": "bart"}')
    live = serve(str(tmp_path), ready=False)
    assert live.process.wait(TIMEOUT_S) == 2
    lines = [line for line in live.log.read_text().splitlines() if "error" in line]
    assert len(lines) == 1
    assert "BartForQuestionAnswering" in lines[0]
