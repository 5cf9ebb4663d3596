"""Ranks, as an operator uses them: answers, and what becomes of one that dies or hangs."""

import os
import pathlib
import signal

import pytest

from tests.end_to_end.conftest import ENGINE, LiveServer, Serve
from tests.end_to_end.test_life_and_death import LONG, Stream, complete, eventually


def other_ranks(server: LiveServer) -> list[int]:
    (engine,) = server.children(ENGINE)
    return [int(pid) for pid in pathlib.Path(f"/proc/{engine}/task/{engine}/children").read_text().split()]


def is_there(pid: int) -> bool:
    return pathlib.Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(
    "setting", ["WEFT_TENSOR_PARALLEL_SIZE", pytest.param("WEFT_PIPELINE_PARALLEL_SIZE", marks=pytest.mark.slow)]
)
def test_an_engine_does_not_outlive_a_rank(serve: Serve, long_model: str, setting: str) -> None:
    server = serve(long_model, WEFT_STALL_TIMEOUT_S="2", **{setting: "2"})
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
