"""`--tensor-parallel-size`, as an operator uses it: answers, and what becomes of a rank that dies or hangs."""

import os
import pathlib
import signal
import subprocess
import sys

from tests.end_to_end.conftest import ENGINE, TIMEOUT_S, LiveServer, Serve
from tests.end_to_end.test_life_and_death import LONG, Stream, complete, eventually


def other_ranks(server: LiveServer) -> list[int]:
    (engine,) = server.children(ENGINE)
    return [int(pid) for pid in pathlib.Path(f"/proc/{engine}/task/{engine}/children").read_text().split()]


def is_there(pid: int) -> bool:
    return pathlib.Path(f"/proc/{pid}").exists()


def test_an_engine_does_not_outlive_a_rank(serve: Serve, long_model: str) -> None:
    server = serve(long_model, "--tensor-parallel-size", "2", WEFT_STALL_TIMEOUT_S="2")
    assert ", 2 ranks, " in server.log.read_text()
    stream = Stream(server, **LONG)
    (engine,), (rank,) = server.children(ENGINE), other_ranks(server)
    os.kill(rank, signal.SIGKILL)
    assert '"code":"engine_restarting"' in stream.wait()
    server.wait_ready()
    assert complete(server).status_code == 200
    assert server.children(ENGINE) != [engine]
    assert "rank 1 has ended (-9), and the engine ends with it" in server.log.read_text()

    stream = Stream(server, **LONG)
    (rank,) = other_ranks(server)
    os.kill(rank, signal.SIGSTOP)
    assert '"code":"engine_restarting"' in stream.wait()
    assert "The engine hangs" in server.log.read_text()
    eventually(lambda: not is_there(rank), "the rank that hung outlives its engine")
    server.wait_ready()
    assert complete(server).status_code == 200
    (rank,) = other_ranks(server)
    assert server.stop() == 0
    eventually(lambda: not is_there(rank), "a rank outlives its server")


def test_what_cannot_be_divided_ends_with_one_line_and_code_2(serve: Serve) -> None:
    server = serve("--tensor-parallel-size", "4", "--device", "cpu", ready=False)
    assert server.process.wait(TIMEOUT_S) == 2
    assert "tensor_parallel_size 4: ranks cannot divide 6 heads over 6 K/V heads" in server.log.read_text()


def test_the_plan_is_that_of_each_rank() -> None:
    command = [sys.executable, "-m", "weft.server", "plan", "--device", "cpu"]
    one, two = (
        dict(line.split(maxsplit=1) for line in subprocess.check_output([*command, *more], text=True).splitlines())
        for more in ([], ["--tensor-parallel-size", "2"])
    )
    assert two["ranks"] == "2; what follows is for each of them"
    weights = [float(plan["weights"].removesuffix(" MB")) for plan in (one, two)]
    assert 0.5 < weights[1] / weights[0] < 0.7  # embedding and head are whole
