"""Two machines, here two servers' process trees on one, as an operator runs them: who dies, hangs, or is drained."""

import os
import pathlib
import signal
from collections.abc import Iterator

import pytest

from tests.end_to_end.conftest import TIMEOUT_S, LiveServer, reserved_port, serving
from tests.end_to_end.test_life_and_death import LONG, Stream, complete, eventually
from tests.end_to_end.test_ranks import is_there

NODE = "weft.engine.ranks.node_process"
TOKEN = "openssl rand -hex 32"


def children(pid: int) -> list[int]:
    return [int(child) for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def logged(server: LiveServer, text: str) -> bool:
    return text in server.log.read_text()


@pytest.fixture
def machines(tmp_path: pathlib.Path, long_model: str) -> Iterator[tuple[LiveServer, LiveServer]]:
    """The second starts first."""
    with reserved_port() as port:
        shared = {"WEFT_PIPELINE_PARALLEL_SIZE": "2", "WEFT_NNODES": "2", "WEFT_MASTER_ADDR": "127.0.0.1"}
        shared |= {"WEFT_MASTER_PORT": str(port), "WEFT_NODES_TOKEN": TOKEN, "WEFT_STALL_TIMEOUT_S": "2"}
        shared |= {"OMP_NUM_THREADS": "1"}  # the machines share the cores
        with serving(tmp_path / "second", long_model, ready=False, WEFT_NODE_RANK="1", **shared) as second:
            eventually(lambda: logged(second, "cannot join yet: [Errno 111]"), "it does not try to join")
            with serving(tmp_path / "first", long_model, **shared) as first:
                yield first, second


def test_both_machines_begin_again_when_one_dies_or_hangs_and_drain_together(
    machines: tuple[LiveServer, LiveServer],
) -> None:
    first, second = machines
    (node,) = second.children(NODE)
    (rank,) = children(node)
    stream = Stream(first, **LONG)
    os.kill(rank, signal.SIGKILL)
    assert '"code":"engine_restarting"' in stream.wait()
    first.wait_ready()
    assert complete(first).status_code == 200
    assert logged(first, "rank 1 on another machine has ended (-9), and the engine ends with it")
    assert logged(second, "rank 1 has ended (-9)")

    tree = [second.process.pid, node, *children(node)]
    stream = Stream(first, **LONG)
    for pid in tree:
        os.kill(pid, signal.SIGSTOP)
    assert '"code":"engine_restarting"' in stream.wait()
    assert logged(first, "The engine hangs")
    waits = "the engine waits for 1 of its machines to join"
    eventually(lambda: waits in first.get("/health").text, "it does not wait for the second machine")
    assert first.get("/health").status_code == 503
    for pid in tree:
        os.kill(pid, signal.SIGCONT)
    eventually(lambda: not is_there(tree[-1]), "the rank that hung outlives its engine")
    first.wait_ready()

    stream = Stream(first, **LONG | {"max_tokens": 100})
    second.process.send_signal(signal.SIGTERM)
    first.process.send_signal(signal.SIGTERM)
    assert '"finish_reason":"length"' in stream.wait()
    assert (first.process.wait(TIMEOUT_S), second.process.wait(TIMEOUT_S)) == (0, 0)
    assert TOKEN not in first.log.read_text() + second.log.read_text()
