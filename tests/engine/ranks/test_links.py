"""Messages between ranks come as they were sent, and nothing else comes."""

import contextlib
import ctypes
import dataclasses
import fcntl
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from weft.engine.batch import AskedLogprobs, Batch, ConditionalBans, GraphKey, ScoreBatch
from weft.engine.batch_inputs import PoolBatch
from weft.engine.cache.block_bytes import ReadBlock, WriteBlock
from weft.engine.config import EngineConfig
from weft.engine.memory_plan import MemoryPlan
from weft.engine.ranks import ranks as links
from weft.engine.ranks.nodes import Ended
from weft.engine.ranks.ranks import Fault, Link, Message, Progress, RankTask, decode, encode
from weft.engine.runner.dummy_batch import largest_batch
from weft.engine.wire.messages import MAX_FRAME_BYTES, EngineOptions

IDS = np.arange(6, dtype=np.int64)
CONFIG = EngineConfig(
    *(EngineOptions(model="m", kernels={"layers": "torch"}), Path("m"), torch.device("cpu"), torch.bfloat16),
    *(100, 4, 64, 16, None, False),
    draft_model=Path("draft"),
)


def a_batch() -> Batch:
    from weft.engine.cache.specs import PagedKV

    batch = largest_batch(CONFIG, [PagedKV(16, 2, 8, torch.bfloat16)])
    sampling = dataclasses.replace(
        batch.sampling,
        conditional_bans=ConditionalBans(IDS, IDS, IDS, IDS),
        asked_logprobs=AskedLogprobs(IDS[::2], IDS[:0]),
    )
    more = {"scores": ScoreBatch(IDS, IDS, IDS), "pooling": PoolBatch(IDS, IDS), "graph": GraphKey(8, True)}
    return dataclasses.replace(batch, sampling=sampling, adapters=IDS.reshape(2, 3).T, **more)  # type: ignore[arg-type]


def check_equal(one: object, other: object) -> None:
    assert type(one) is type(other)
    if isinstance(one, np.ndarray):
        assert isinstance(other, np.ndarray)
        assert (one.dtype, one.shape, one.tolist()) == (other.dtype, other.shape, other.tolist())
        assert other.flags.writeable  # as torch wants it
    elif isinstance(one, tuple):
        for a, b in zip(one, other, strict=True):  # type: ignore[call-overload]
            check_equal(a, b)
    elif dataclasses.is_dataclass(one):
        for field in dataclasses.fields(one):
            check_equal(getattr(one, field.name), getattr(other, field.name))
    else:
        assert one == other


@pytest.mark.parametrize(
    "message",
    [
        RankTask(CONFIG, "10.0.0.1", 1234),
        MemoryPlan(1, 2, 3, 4, 5, 6, 7),
        a_batch(),
        ReadBlock(0, 7),
        WriteBlock(1, 8, b"\0\1" * 3_000_000),
        Progress(True),
        Fault("no such folder"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_comes_as_it_was_sent(message: Message) -> None:
    ours, theirs = map(Link, socket.socketpair())
    sending = threading.Thread(target=ours.send, args=(message,))
    sending.start()
    check_equal(message, theirs.recv())
    sending.join()
    assert not theirs.has_message(0.0)
    ours.close()
    with pytest.raises(EOFError):
        theirs.recv()
    theirs.close()


def test_what_is_no_message_is_refused() -> None:
    whole = encode(a_batch())[4:]
    fields = msgspec.msgpack.decode(whole[1:])
    for value in ([[6], "<f8", bytes(48)], [[7], "<i8", bytes(48)], [[6], "<i8", 1 << 40], [[6], "|O", bytes(48)], 5):
        with pytest.raises(ValueError):
            decode(whole[:1] + msgspec.msgpack.encode(fields | {"token_ids": value}))
    for body in (b"", b"\xff", whole[:1], whole[:-1], b"\x00" + whole[1:]):
        with pytest.raises(ValueError):
            decode(body)


def test_a_frame_that_is_too_long_is_refused_before_it_is_read() -> None:
    ours, theirs = socket.socketpair()
    link = Link(theirs)
    ours.sendall((MAX_FRAME_BYTES + 1).to_bytes(4, "little"))
    with pytest.raises(ValueError, match=f"frame of {MAX_FRAME_BYTES + 1} bytes"):
        link.recv()
    ours.close()
    link.close()


def test_an_end_comes_from_a_process_without_torch() -> None:
    assert Ended(-11).encode() == encode(Ended(-11))
    assert decode(Ended(-11).encode()[4:]) == Ended(-11)


_CLONE_NEWNET = 0x40000000
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1


def switch_loopback(flags: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags))


@contextlib.contextmanager
def tcp_pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as ours,
        server.accept()[0] as theirs,
    ):
        yield ours, theirs


def test_a_machine_that_no_longer_acknowledges_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a batch on its way, TCP tried for 15 minutes, and keep-alive did not look."""
    monkeypatch.setattr(links, "_LOOK_S", 0.02)
    monkeypatch.setattr(links, "_MAX_REPEATS", 1)

    def cut() -> bool:
        """In a network namespace of this thread's own, which only root can have."""
        if ctypes.CDLL(None).unshare(_CLONE_NEWNET):
            return False
        switch_loopback(_IFF_UP)
        with tcp_pair() as (peer, _):
            link = Link(peer)
            switch_loopback(0)
            link.send(Progress(True))
            with pytest.raises(TimeoutError, match="its machine does not answer"):
                link.recv()
        return True

    with ThreadPoolExecutor(1) as thread:
        if not thread.submit(cut).result(60):
            pytest.skip("no network namespace of our own")


def test_a_peer_that_reads_late_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a rank in a long step, behind which messages wait."""
    monkeypatch.setattr(links, "_LOOK_S", 0.02)
    monkeypatch.setattr(links, "_MAX_REPEATS", 1)
    with tcp_pair() as (ours, theirs):
        ours.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while ours.send(bytes(1 << 20)):
                pass
        threading.Timer(0.6, theirs.sendall, [encode(Progress(True))]).start()
        assert Link(ours).recv() == Progress(True)
