"""Ranks of two machines, here two processes' children on one, compute a model together."""

import contextlib
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.architectures.checkpoints import write
from tests.end_to_end.conftest import reserved_port
from tests.engine.guidance.demo import DEMO_MODEL
from tests.engine.ranks.test_ranks import ForkedRank, check_ids, keep_threads, options
from weft.engine.ranks import node_process
from weft.engine.ranks.node_process import Node
from weft.engine.ranks.nodes import Ended
from weft.engine.ranks.ranks import Link
from weft.engine.wire.status_page import StatusPage

__all__ = ["keep_threads"]


@contextlib.contextmanager
def second_machine(folder: Path, page: Path, num_ranks: int, more: dict[str, Any]) -> Iterator[None]:
    """Follows one engine, and then leaves."""
    status = StatusPage(page)
    node = Node(status, options(folder, num_ranks, **more, node_rank=1))
    thread = threading.Thread(target=node.run)
    thread.start()
    yield
    thread.join()
    assert not status.read().is_ready


@pytest.mark.parametrize(
    ("num_ranks", "num_stages"),
    [(2, 1), (1, 2), (2, 2), pytest.param(4, 1, marks=pytest.mark.slow)],
)
def test_ids_are_those_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_ranks: int, num_stages: int
) -> None:
    monkeypatch.setattr(subprocess, "Popen", ForkedRank)
    follow = Node._follow

    def follow_once(node: Node, links: Any) -> None:
        node.leave()
        follow(node, links)

    monkeypatch.setattr(Node, "_follow", follow_once)
    monkeypatch.setattr(node_process, "_RETRY_S", 0.05)
    folder = write("llama", tmp_path)
    with reserved_port() as port:
        sizes = {"max_num_seqs": 4, "block_size": 8, "max_num_batched_tokens": 16}
        more = {"nnodes": 2, "master_addr": "127.0.0.1", "master_port": port, "nodes_token": "sixteen letters!"}
        there = {**sizes, "pipeline_parallel_size": num_stages, **more}
        with second_machine(folder, tmp_path / "page", num_ranks, there):
            check_ids(folder, num_ranks, num_stages, **more)


@pytest.mark.parametrize(("program", "ends"), [("kill -TERM $$", [Ended(-signal.SIGTERM)]), ("exit 0", [])])
def test_the_first_machine_hears_how_a_rank_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, ends: list[Ended]
) -> None:
    """It took every end for a kill from outside, so a request that ends ranks was sent to them again and again."""
    start = subprocess.Popen
    monkeypatch.setattr(node_process, "start_rank", lambda *_: start(["sh", "-c", program], stdin=subprocess.DEVNULL))
    ours, theirs = socket.socketpair()
    node = Node(StatusPage(tmp_path / "page"), options(DEMO_MODEL, 2, nnodes=2, node_rank=1))
    node._follow([theirs])
    link, found = Link(ours), []
    with pytest.raises(EOFError):
        while True:
            found.append(link.recv())
    link.close()
    assert found == ends
