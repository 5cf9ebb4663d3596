"""The supervisor in a process of its own, with small children in place of engine and servers.

The children write their process ids to `<name>.pids` beside the runtime directory and read there what to do.
"""

import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest

from weft.engine.wire.messages import EngineOptions
from weft.engine.wire.status_page import StatusPage
from weft.server.settings import Settings
from weft.server.supervise import supervisor

SUPERVISOR = """
import pathlib, sys
from weft.engine.wire import errors as logs
from weft.server.supervise import supervisor
from weft.server.settings import Settings
supervisor.DRAIN_MARGIN_S = 0.2
supervisor.REPEAT_S = float(sys.argv[3])
logs.configure("text", "supervisor")
settings = Settings(
    port=0, model="/model", served_model_name=("m",), drain_timeout_s=float(sys.argv[1]), server_processes=2,
    models={"m": {"model": "/model", "load": sys.argv[5]}},
)
folder = pathlib.Path(sys.argv[2])
engine, server = ((sys.argv[4], str(folder / name)) for name in ("fake_engine.py", "fake_server.py"))
commands = supervisor.Commands(engine, server)
sys.exit(supervisor.run(settings, commands))
"""

CHILD = """
import os, pathlib, signal, socket, sys, time
runtime_dir = pathlib.Path(sys.argv[1])
beside = next(path.parent for path in (runtime_dir, *runtime_dir.parents) if path.name.startswith("weft-"))
stdin = sys.stdin.read()
def say(file, text):
    with (beside / file).open("a") as f:
        f.write(text + chr(10))
def told(file):
    path = beside / file
    return float(path.read_text() or 0) if path.exists() else 0.0
"""

ENGINE = (
    CHILD
    + """
from weft.engine.wire.status_page import Status, StatusPage
signal.signal(signal.SIGTERM, signal.SIG_IGN)
say("engine.pids", str(os.getpid()))
say("engine.stdin", stdin)
code = int(told("engine_exit"))
if code < 0:
    os.kill(os.getpid(), -code)
if code:
    sys.exit(code)
while told("engine_loads"):
    time.sleep(0.01)
page = StatusPage(runtime_dir / "status")
counts = dict(prompt_tokens=7, num_used_blocks=3, num_requests_running=2)
silence_s = told("engine_silence")
while True:
    if not told("engine_hangs"):
        now = time.monotonic()
        page.write(Status(os.getpid(), 1, now, stall_time=now + silence_s if silence_s else 0.0, **counts))
    time.sleep(0.1)
"""
)

SERVER = (
    CHILD
    + """
from weft.server.supervise.supervisor import ready_file
def drain(*_):
    say("drained", str(os.getpid()))
    while told("lingers"):
        time.sleep(0.01)
    os._exit(0)
signal.signal(signal.SIGTERM, drain)
listener = socket.socket(fileno=int(sys.argv[2]))
say("server.pids", str(os.getpid()))
say("server.stdin", stdin)
while (beside / "serves").exists() and not told("serves"):
    time.sleep(0.01)
ready_file(runtime_dir, os.getpid()).touch()
while True:
    connection, _ = listener.accept()
    connection.sendall(str(os.getpid()).encode())
    connection.close()
"""
)


TIMEOUT_S = 120.0
"""Longest wait; reached only in a failure."""


def eventually(claim: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not claim():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter between opening and reading
        return False


class Weft:
    """A running supervisor and what its children wrote."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        (folder / "fake_engine.py").write_text(ENGINE)
        (folder / "fake_server.py").write_text(SERVER)
        self.process: subprocess.Popen[bytes] | None = None

    def start(
        self,
        drain_timeout_s: float = 2 * TIMEOUT_S,
        repeat_s: float = supervisor.REPEAT_S,
        ignored: signal.Signals | None = None,
        command: str = sys.executable,
        load: str = "always",
    ) -> None:
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-c", SUPERVISOR, str(drain_timeout_s), str(self.folder), str(repeat_s)),
                    command,
                    load,
                ],
                env=os.environ | {"XDG_RUNTIME_DIR": str(self.folder)},
                stderr=log,
                start_new_session=True,
                preexec_fn=ignored and (lambda: signal.signal(ignored, signal.SIG_IGN)),
            )

    def tell(self, file: str, value: float) -> None:
        (self.folder / file).write_text(str(value))

    def read(self, file: str) -> list[str]:
        path = self.folder / file
        return path.read_text().splitlines() if path.exists() else []

    def pids(self, name: str) -> list[int]:
        return [int(line) for line in self.read(f"{name}.pids")]

    @property
    def num_ready(self) -> int:
        return sum(" Serving m: chat at " in line for line in self.read("log"))

    def wait_ready(self, times: int = 1) -> None:
        eventually(lambda: self.num_ready == times, "ready")

    @property
    def runtime_dir(self) -> pathlib.Path:
        eventually(lambda: len(list(self.folder.glob("weft-*"))) == 1, "runtime directory")
        (path,) = self.folder.glob("weft-*")
        return path

    def ask(self) -> int:
        """Process id of the server that answers on the port."""
        port = int(self.read("log")[-1].rsplit(":", 1)[1].split("/")[0])
        with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as connection:
            return int(connection.recv(100))

    def signal(self, signum: int) -> None:
        assert self.process is not None
        self.process.send_signal(signum)

    def wait(self) -> int:
        assert self.process is not None
        return self.process.wait(TIMEOUT_S)

    def all_pids(self) -> list[int]:
        return self.pids("engine") + self.pids("server")


@pytest.fixture
def weft(tmp_path: pathlib.Path) -> Iterator[Weft]:
    weft = Weft(tmp_path)
    yield weft
    if weft.process is not None and weft.process.poll() is None:
        weft.process.kill()
        weft.process.wait()
    eventually(lambda: not any(is_alive(pid) for pid in weft.all_pids()), "no child outlives the supervisor")


def test_serves_from_a_private_folder_and_drains_on_a_terminals_interrupt(weft: Weft) -> None:
    weft.start()
    weft.wait_ready()
    folder = weft.runtime_dir
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.name for path in folder.iterdir()} == {
        *("0", "asks", "metrics", "models.json", "supervisor"),
        *(f"server.{pid}.ready" for pid in weft.pids("server")),
    }
    (options,) = weft.read("engine.stdin")
    assert msgspec.json.decode(options, type=EngineOptions).model == "/model"
    told = [Settings.model_validate_json(line) for line in weft.read("server.stdin")]
    assert {settings.model for settings in told} == {"/model"}
    (data_dir,) = {settings.data_dir for settings in told}  # both processes see the same files and responses
    assert data_dir is not None and pathlib.Path(data_dir).is_dir()
    assert weft.ask() in weft.pids("server")
    assert weft.process is not None
    os.killpg(weft.process.pid, signal.SIGINT)  # what Ctrl-C does: it reaches the children, too
    assert weft.wait() == 0
    assert sorted(weft.read("drained")) == sorted(str(pid) for pid in weft.pids("server"))
    assert not folder.exists()
    assert not pathlib.Path(data_dir).exists()
    assert len(weft.pids("engine")) == 1


def test_is_not_ready_before_the_engine_is(weft: Weft) -> None:
    weft.tell("engine_loads", 1)
    weft.start()
    eventually(lambda: len(list(weft.runtime_dir.glob("server.*.ready"))) == 2, "servers start beside the engine")
    time.sleep(0.2)
    assert weft.num_ready == 0
    weft.tell("engine_loads", 0)
    weft.wait_ready()


def test_engine_that_dies_is_restarted_at_once(weft: Weft) -> None:
    weft.start()
    weft.wait_ready()
    weft.tell("engine_loads", 1)
    os.kill(weft.pids("engine")[0], signal.SIGKILL)
    page = StatusPage(weft.runtime_dir / "0" / "status")
    eventually(lambda: page.read().is_ready == 0, "the dead engine's page says that nothing is served")
    assert (page.read().num_used_blocks, page.read().prompt_tokens) == (0, 7)
    page.close()
    weft.tell("engine_loads", 0)
    weft.wait_ready(times=2)
    assert len(weft.pids("engine")) == 2
    assert len(weft.pids("server")) == 2
    assert any("engine process was killed by SIGKILL; restarting it delay_s=0.0" in line for line in weft.read("log"))


def test_server_that_dies_is_replaced_and_the_port_stays(weft: Weft) -> None:
    weft.start()
    weft.wait_ready()
    victim = weft.pids("server")[0]
    os.kill(victim, signal.SIGKILL)
    weft.wait_ready(times=2)
    assert len(weft.pids("server")) == 3
    assert len(weft.pids("engine")) == 1
    assert weft.ask() in weft.pids("server")[1:]
    assert not supervisor.ready_file(weft.runtime_dir, victim).exists()


def test_engine_that_cannot_load_its_model_ends_everything(weft: Weft) -> None:
    weft.tell("engine_exit", 2)
    weft.start()
    assert weft.wait() == 2
    assert len(weft.pids("engine")) == 1
    assert not list(weft.folder.glob("weft-*"))


def test_engine_that_hangs_is_killed_and_restarted(weft: Weft) -> None:
    """A hanging engine was left alone, without a log line."""
    weft.tell("engine_silence", 5)  # more than any process has to wait for its processor
    weft.start()
    weft.wait_ready()
    (weft.runtime_dir / "0" / "step").touch()
    weft.tell("engine_hangs", 1)
    eventually(lambda: len(weft.pids("engine")) == 2, "it is restarted")
    weft.tell("engine_hangs", 0)
    weft.wait_ready(times=2)
    assert len(weft.pids("engine")) == 2
    assert not is_alive(weft.pids("engine")[0])
    assert (weft.runtime_dir / "0" / "step").exists(), "whoever hangs an engine is to blame"
    lines = [line for line in weft.read("log") if "ERROR" in line]
    told = r"The engine hangs: no sign of life for (\d+) s, with 2 requests running and 0 waiting; killing it"
    assert (found := re.search(told, lines[0])) and int(found[1]) >= 5
    assert "engine process was killed by SIGKILL; restarting it" in lines[1]
    assert len(lines) == 2


@pytest.mark.parametrize(("signum", "is_kept"), [(signal.SIGKILL, False), (signal.SIGSEGV, True)])
def test_a_kill_from_outside_is_no_requests_fault(weft: Weft, signum: int, is_kept: bool) -> None:
    """After two kills by the out-of-memory killer, innocent requests were refused for ever."""
    weft.start()
    weft.wait_ready()
    (weft.runtime_dir / "0" / "step").touch()
    os.kill(weft.pids("engine")[0], signum)
    weft.wait_ready(times=2)
    assert (weft.runtime_dir / "0" / "step").exists() == is_kept


def test_an_operator_clears_the_suspects(weft: Weft) -> None:
    weft.start()
    weft.wait_ready()
    (weft.runtime_dir / "0" / "suspects").touch()
    weft.signal(signal.SIGUSR1)
    eventually(lambda: any("forget which requests" in line for line in weft.read("log")), "it is said")
    assert not (weft.runtime_dir / "0" / "suspects").exists()
    weft.signal(signal.SIGUSR1)  # nothing is left to be forgotten
    eventually(lambda: sum("forget which requests" in line for line in weft.read("log")) == 2, "and once more")


@pytest.mark.parametrize(("code", "ending"), [(1, "exited with code 1"), (-9, "was killed by SIGKILL")])
def test_engine_that_never_starts_ends_everything(weft: Weft, code: int, ending: str) -> None:
    """It was restarted for ever."""
    weft.tell("engine_exit", code)
    weft.start()
    assert weft.wait() == 2
    assert len(weft.pids("engine")) == supervisor.MAX_START_FAILURES
    last = weft.read("log")[-1]
    assert f"The engine process {ending}, and 3 times in all before it was ready: ending." in last
    assert "MB are free" in last
    assert "files may be open (ulimit -n)" in last
    assert not list(weft.folder.glob("weft-*"))


def test_a_process_that_cannot_be_made_is_tried_again_and_then_ends_everything(weft: Weft) -> None:
    """The supervisor ended with a traceback."""
    weft.start(command="/no/such/program")
    assert weft.wait() == 2
    lines = [line for line in weft.read("log") if "The engine process cannot be started" in line]
    assert len(lines) == supervisor.MAX_START_FAILURES
    assert "No such file or directory" in lines[0]


def test_engine_that_crashes_while_loading_is_tried_again(weft: Weft) -> None:
    weft.tell("engine_exit", 1)
    weft.start()
    eventually(lambda: len(weft.pids("engine")) >= 2, "tried again")
    (weft.folder / "engine_exit").unlink()
    weft.wait_ready()


def test_exit_code_2_of_a_later_engine_is_no_reason_to_give_up(weft: Weft) -> None:
    weft.start()
    weft.wait_ready()
    weft.tell("engine_exit", 2)
    os.kill(weft.pids("engine")[0], signal.SIGKILL)
    eventually(lambda: len(weft.pids("engine")) >= 3, "tried again")
    (weft.folder / "engine_exit").unlink()
    weft.wait_ready(times=2)


def test_drain_waits_for_servers_and_keeps_the_engine_until_then(weft: Weft) -> None:
    weft.tell("lingers", 1)
    weft.start()
    weft.wait_ready()
    weft.signal(signal.SIGTERM)
    eventually(lambda: len(weft.read("drained")) == 2, "servers are told")
    time.sleep(0.2)
    assert all(is_alive(pid) for pid in weft.all_pids())
    weft.tell("lingers", 0)
    assert weft.wait() == 0


def ask_to_load(weft: Weft) -> None:
    (weft.runtime_dir / "asks" / "1.json").write_text('{"kind": "load", "model": "m"}')
    weft.signal(signal.SIGURG)


def test_a_request_that_waits_while_servers_drain_has_its_model_loaded(weft: Weft) -> None:
    weft.tell("lingers", 1)
    weft.start(load="on-demand")
    weft.wait_ready()
    weft.signal(signal.SIGTERM)
    eventually(lambda: len(weft.read("drained")) == 2, "servers are told")
    ask_to_load(weft)
    eventually(lambda: len(weft.pids("engine")) == 1, "it is started")
    os.kill(weft.pids("engine")[0], signal.SIGKILL)
    eventually(lambda: len(weft.pids("engine")) == 2, "it is restarted")
    weft.tell("lingers", 0)
    assert weft.wait() == 0


def test_a_model_on_demand_that_crashes_again_and_again_ends_nothing(weft: Weft) -> None:
    """Also before everything was ready."""
    weft.tell("serves", 0)
    weft.start(load="on-demand")
    eventually(lambda: len(weft.pids("server")) == 2, "servers run")
    ask_to_load(weft)
    for number in range(4):
        eventually(lambda number=number: len(weft.pids("engine")) == number + 1, "it is started")  # type: ignore[misc]
        eventually(lambda: '"ready"' in (weft.runtime_dir / "models.json").read_text(), "it is ready")
        os.kill(weft.pids("engine")[-1], signal.SIGSEGV)
    weft.tell("serves", 1)
    weft.wait_ready()


def test_second_signal_forces(weft: Weft) -> None:
    weft.tell("lingers", 1)
    weft.start()
    weft.wait_ready()
    weft.signal(signal.SIGTERM)
    eventually(lambda: len(weft.read("drained")) == 2, "servers are told")
    time.sleep(supervisor.REPEAT_S)
    weft.signal(signal.SIGTERM)
    assert weft.wait() == supervisor.EXIT_FORCED


def test_signal_to_process_and_group_is_one_request_to_stop(weft: Weft) -> None:
    """`timeout` and service managers signal both, and the second signal cut every stream."""
    weft.tell("lingers", 1)
    weft.start(repeat_s=TIMEOUT_S)  # the echo comes in time also where this process has to wait for its processor
    weft.wait_ready()
    weft.signal(signal.SIGTERM)
    eventually(lambda: any("Draining" in line for line in weft.read("log")), "the first one is seen")
    weft.signal(signal.SIGTERM)
    time.sleep(0.2)
    weft.tell("lingers", 0)
    assert weft.wait() == 0


def test_server_that_does_not_end_is_ended(weft: Weft) -> None:
    weft.tell("lingers", 1)
    weft.start(drain_timeout_s=0.1)
    weft.wait_ready()
    weft.signal(signal.SIGTERM)
    assert weft.wait() == 0


def test_children_die_with_a_supervisor_that_is_killed(weft: Weft) -> None:
    weft.start()
    weft.wait_ready()
    assert all(is_alive(pid) for pid in weft.all_pids())
    weft.signal(signal.SIGKILL)
    weft.wait()  # the fixture sees that no child is left


def test_a_lost_runtime_folder_is_told_before_anybody_needs_it(weft: Weft) -> None:
    weft.start()
    weft.wait_ready()
    lost = weft.runtime_dir
    shutil.rmtree(lost)
    weft.signal(signal.SIGUSR1)  # it looks whenever it wakes
    eventually(lambda: any(f"The runtime folder {lost} was removed" in line for line in weft.read("log")), "not told")


def test_a_lost_runtime_folder_is_made_again_when_a_child_needs_it(weft: Weft) -> None:
    """Every engine died at once in the folder that a logout had taken away, for ever."""
    weft.start()
    weft.wait_ready()
    lost = weft.runtime_dir
    first = weft.all_pids()
    shutil.rmtree(lost)
    os.kill(weft.pids("engine")[0], signal.SIGKILL)
    weft.wait_ready(times=2)
    assert weft.runtime_dir != lost
    assert sum(f"The runtime folder {lost} is gone" in line for line in weft.read("log")) == 1
    assert not any(is_alive(pid) for pid in first)
    assert weft.ask() in weft.pids("server")
    weft.signal(signal.SIGTERM)
    assert weft.wait() == 0
    assert not list(weft.folder.glob("weft-*"))


def test_a_hangup_drains(weft: Weft) -> None:
    """A terminal that is closed killed the supervisor, and its children at once."""
    weft.start()
    weft.wait_ready()
    assert weft.process is not None
    os.killpg(weft.process.pid, signal.SIGHUP)  # it reaches the children, too
    assert weft.wait() == 0
    assert len(weft.read("drained")) == 2


def test_nohup_means_what_it_says(weft: Weft) -> None:
    weft.start(ignored=signal.SIGHUP)
    weft.wait_ready()
    weft.signal(signal.SIGHUP)
    os.kill(weft.pids("server")[0], signal.SIGKILL)  # what comes later is seen
    weft.wait_ready(times=2)
    assert weft.read("drained") == []


def test_sleeps_when_nothing_happens(weft: Weft) -> None:
    weft.start()
    weft.wait_ready()
    assert weft.process is not None
    status = pathlib.Path(f"/proc/{weft.process.pid}/status")

    def num_wakeups() -> int:
        return sum(int(line.split()[1]) for line in status.read_text().splitlines() if "ctxt_switches" in line)

    def is_asleep() -> bool:
        before = num_wakeups()
        time.sleep(0.5)
        return num_wakeups() == before

    eventually(is_asleep, "it wakes for nothing")
