"""What users see when processes die, drain and come back."""

import contextlib
import os
import pathlib
import shutil
import signal
import threading
import time
from typing import Any

import httpx
import pytest

import server
from tests.end_to_end.conftest import LiveServer, Serve

MODEL = "weft-demo"
LONG: dict[str, Any] = {"prompt": [20] * 30, "max_tokens": 3000, "ignore_eos": True, "temperature": 0}


def complete(server: LiveServer, **body: Any) -> httpx.Response:
    body = {"model": MODEL, "prompt": [20, 21], "max_tokens": 3} | body
    return httpx.post(f"{server.base_url}/v1/completions", json=body, timeout=60)


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
        assert self.first.wait(20), "no first chunk"

    def _run(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=60) as reply:
                for chunk in reply.iter_text():
                    self.text += chunk
                    self.first.set()
        except httpx.TransportError:
            self.is_cut = True

    def wait(self) -> str:
        self.thread.join(30)
        assert not self.thread.is_alive(), "the stream hangs"
        assert not self.is_cut, "the connection was cut"
        return self.text


def wait_until_serving(server: LiveServer) -> None:
    server.wait_ready()
    assert complete(server).status_code == 200


def test_an_engine_that_dies_fails_its_requests_at_once_and_comes_back(serve: Serve) -> None:
    server = serve()
    (engine,) = server.children("engine.process")
    stream = Stream(server, **LONG)
    os.kill(engine, signal.SIGKILL)
    killed = time.monotonic()
    text = stream.wait()
    assert time.monotonic() - killed < 2
    assert '"error"' in text
    assert text.endswith("data: [DONE]\n\n")
    reply = httpx.get(f"{server.base_url}/ready")
    assert reply.status_code == 503
    refused = complete(server)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "engine_restarting"
    assert float(refused.headers["retry-after"]) > 0
    wait_until_serving(server)
    assert server.children("engine.process") != [engine]
    assert server.stop() == 0


def test_requests_that_had_no_token_yet_are_told_as_well(serve: Serve) -> None:
    """Accepted, but still waiting when the engine dies."""
    server = serve("--max-num-seqs", "1")
    running = Stream(server, **LONG)
    replies: list[httpx.Response] = []
    waiting = [
        threading.Thread(target=lambda stream=stream: replies.append(complete(server, stream=stream)))
        for stream in (False, True)
    ]
    for thread in waiting:
        thread.start()
    server.wait_for_metric("weft:num_requests_waiting", 2)
    os.kill(server.children("engine.process")[0], signal.SIGKILL)
    for thread in waiting:
        thread.join(2)
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


@pytest.mark.parametrize("has_work", [True, False])
def test_an_engine_that_hangs_is_not_healthy(serve: Serve, has_work: bool) -> None:
    """One that hung without work looked idle for ever, even while a request waited for its answer."""
    server = serve(WEFT_STALL_TIMEOUT_S="0.5")
    (engine,) = server.children("engine.process")
    if has_work:
        stream = Stream(server, **(LONG | {"max_tokens": 500}))
    os.kill(engine, signal.SIGSTOP)
    asking = threading.Thread(target=complete, args=(server,))
    asking.start()
    wait_for_health(server, 503)
    os.kill(engine, signal.SIGCONT)
    wait_for_health(server, 200)
    asking.join(20)
    assert not asking.is_alive()
    if has_work:
        assert '"finish_reason":"length"' in stream.wait()


def wait_for_health(server: LiveServer, status: int) -> None:
    deadline = time.monotonic() + 5
    while httpx.get(f"{server.base_url}/health").status_code != status:
        assert time.monotonic() < deadline, f"/health does not turn {status}"
        time.sleep(0.05)


def test_nobody_works_while_there_is_nothing_to_do(serve: Serve) -> None:
    server = serve()
    assert complete(server).status_code == 200
    pids = [server.process.pid, *server.children("engine.process"), *server.children("server.process")]
    time.sleep(0.5)
    before = cpu_seconds(pids)
    time.sleep(3)
    assert cpu_seconds(pids) - before <= 0.05  # the web server looks at the clock ten times a second


def cpu_seconds(pids: list[int]) -> float:
    """Time that processes have computed so far, all their threads together."""
    fields = [pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(user) + int(system) for *_, user, system in (f[:13] for f in fields)) / os.sysconf("SC_CLK_TCK")


def test_a_request_that_kills_the_engine_alone_is_refused(serve: Serve) -> None:
    """Killed twice while it ran: first as one of two suspects, then alone. Its neighbour is served."""
    server = serve()
    neighbour = LONG | {"prompt": [30] * 30}
    poison = [Stream(server, **LONG), Stream(server, **neighbour)]
    os.kill(server.children("engine.process")[0], signal.SIGKILL)
    for stream in poison:
        assert '"error"' in stream.wait()
    server.wait_ready()
    again = Stream(server, **LONG)
    os.kill(server.children("engine.process")[0], signal.SIGKILL)
    assert '"error"' in again.wait()
    server.wait_ready()
    refused = complete(server, **LONG)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "poison_request"
    assert refused.headers["x-should-retry"] == "false"
    assert complete(server, **(neighbour | {"max_tokens": 3})).status_code == 200


def test_a_server_process_that_dies_is_replaced_and_its_requests_leave_the_engine(serve: Serve) -> None:
    server = serve("--server-processes", "2")
    assert len(server.children("server.process")) == 2
    stream = Stream(server, **LONG)
    server.wait_for_metric("weft:num_requests_running", 1)
    for pid in server.children("server.process"):
        os.kill(pid, signal.SIGKILL)
    stream.thread.join(10)
    assert stream.is_cut
    deadline = time.monotonic() + 20
    while len(server.children("server.process")) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    wait_until_serving(server)
    server.wait_for_metric("weft:num_requests_running", 0)
    server.wait_for_metric("weft:kv_cache_usage_perc", 0)


def test_ready_means_that_every_server_process_serves(serve: Serve) -> None:
    """A connection goes to any of them, and one of them meets the engine first."""
    server = serve("--server-processes", "4")
    assert [complete(server).status_code for _ in range(16)] == [200] * 16


def test_sigterm_drains(serve: Serve) -> None:
    server = serve()
    stream = Stream(server, **(LONG | {"max_tokens": 400}))
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    refused = complete(server)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "shutting_down"
    assert refused.headers["connection"] == "close"
    text = stream.wait()
    assert text.endswith("data: [DONE]\n\n")
    assert '"finish_reason":"length"' in text
    assert server.process.wait(20) == 0


def test_a_second_signal_forces(serve: Serve) -> None:
    server = serve()
    stream = Stream(server, **LONG)
    server.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert server.process.poll() is None
    server.process.send_signal(signal.SIGINT)
    server.process.wait(5)
    stream.thread.join(5)
    assert not stream.thread.is_alive()
    assert '"finish_reason":"length"' not in stream.text


def test_the_engine_dies_with_the_supervisor(serve: Serve) -> None:
    server = serve()
    children = server.children("engine.process") + server.children("server.process")
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.wait(5)
    deadline = time.monotonic() + 5
    while any(os.path.exists(f"/proc/{pid}/exe") for pid in children):
        assert time.monotonic() < deadline, "children outlive the supervisor"
        time.sleep(0.05)


def wait_in_queue(server: LiveServer) -> None:
    with contextlib.suppress(httpx.TransportError):  # the server ends with the test
        complete(server, prompt=[40])


def test_a_full_queue_is_said(serve: Serve) -> None:
    server = serve("--max-num-seqs", "1", WEFT_MAX_NUM_WAITING="1")
    running = Stream(server, **LONG)
    threading.Thread(target=wait_in_queue, args=(server,), daemon=True).start()
    server.wait_for_metric("weft:num_requests_waiting", 1)
    refused = complete(server, prompt=[41])
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "queue_full"
    assert "retry-after" in refused.headers
    assert running.thread.is_alive()


def test_a_model_that_cannot_be_loaded_ends_with_one_line(serve: Serve, tmp_path: pathlib.Path) -> None:
    demo = pathlib.Path(server.__file__).parent / "demo_model"
    shutil.copy(demo / "tokenizer.json", tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["MambaForCausalLM"], "model_type": "mamba"}')
    live = serve(str(tmp_path), ready=False)
    assert live.process.wait(30) == 2
    lines = [line for line in live.log.read_text().splitlines() if "error" in line]
    assert len(lines) == 1
    assert "MambaForCausalLM" in lines[0]
