"""Machines find each other, prove that they share a token, and refuse what does not fit."""

import contextlib
import json
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.end_to_end.conftest import reserved_port
from weft.engine.ranks import nodes
from weft.engine.ranks.nodes import Gathering, RefusedError, facts, interface, join
from weft.engine.wire.errors import ModelError
from weft.engine.wire.messages import EngineOptions, receive


def write(folder: Path, weights: bytes) -> str:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights)
    return str(folder)


@pytest.fixture
def first(tmp_path: Path) -> Iterator[EngineOptions]:
    model = write(tmp_path / "model", bytes(100_000))
    with reserved_port() as port:
        yield EngineOptions(
            model=model,
            tensor_parallel_size=2,
            pipeline_parallel_size=2,
            nnodes=2,
            master_addr="127.0.0.1",
            master_port=port,
            nodes_token="a secret of some length",
        )


class Waiting:
    """A first machine that waits in a thread."""

    def __init__(self, options: EngineOptions) -> None:
        self.missing: list[int] = []
        self.sockets: list[socket.socket] = []
        self._gathering = Gathering(options)
        self._is_open = threading.Event()
        self.thread = threading.Thread(target=self._wait, daemon=True)
        self.thread.start()
        assert self._is_open.wait(60)

    def _wait(self) -> None:
        self.host, self.sockets = self._gathering.wait(self._show)

    def _show(self, number: int) -> None:
        self.missing.append(number)
        self._is_open.set()


@contextlib.contextmanager
def waiting(first: EngineOptions) -> Iterator[Waiting]:
    """It must still let the second machine in at the end."""
    there = Waiting(first)
    yield there
    second = msgspec.structs.replace(first, node_rank=1, log_format="json")
    links = [join(second, rank, facts(second)) for rank in second.ranks_here]
    there.thread.join(60)
    assert there.missing == [1, 0] and there.host == "127.0.0.1"
    for index, (theirs, ours) in enumerate(zip(there.sockets, links, strict=True)):
        theirs.sendall(bytes([index]))
        assert ours.recv(1) == bytes([index])
        theirs.close()
        ours.close()
    with pytest.raises(ConnectionRefusedError):  # nobody listens while the engine runs
        join(second, 2, {})


def test_consecutive_ranks_are_of_one_machine(first: EngineOptions) -> None:
    second = msgspec.structs.replace(first, node_rank=1)
    assert (first.ranks_here, second.ranks_here) == (range(2), range(2, 4))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"nodes_token": "another one, as long"}, "it has another nodes_token"),
        ({"dtype": "float16"}, "dtype is float16 on the joining machine, auto on the first$"),
        ({"tensor_parallel_size": 4}, "tensor_parallel_size is 4 on the joining machine, 2 on the first"),
    ],
)
def test_another_token_or_setting_is_refused_in_both_logs(
    first: EngineOptions, change: dict[str, str], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    second = msgspec.structs.replace(first, node_rank=1, **change)
    with waiting(first), caplog.at_level(logging.WARNING), pytest.raises(RefusedError, match=reason):
        join(second, 2, facts(second))
    assert caplog.messages[0].startswith("127.0.0.1 cannot join: ") and reason.strip("$") in caplog.messages[0]


def test_another_model_of_the_same_size_is_refused(first: EngineOptions, tmp_path: Path) -> None:
    other = bytearray(100_000)
    other[50_000] = 1
    second = msgspec.structs.replace(first, node_rank=1, model=write(tmp_path / "other", bytes(other)))
    with waiting(first), pytest.raises(RefusedError, match=r"model is \w+ on the joining machine, \w+ on the first$"):
        join(second, 2, facts(second))


def test_gguf_files_are_compared_wherever_they_are(first: EngineOptions, tmp_path: Path) -> None:
    """Their paths had to be the same, and nothing else."""

    def model(name: str, weights: bytes) -> str:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "m.gguf").write_bytes(weights)
        config = {
            "quantization_config": {"quant_method": "gguf", "files": [str(folder / "m.gguf")], "versions": [name]}
        }
        (folder / "config.json").write_text(json.dumps(config))
        return facts(msgspec.structs.replace(first, model=str(folder)))["model"]

    assert model("a", bytes(100_000)) == model("b", bytes(100_000)) != model("c", bytes([1]) * 100_000)


def test_another_adapter_at_the_same_path_does_not_fit(first: EngineOptions, tmp_path: Path) -> None:
    """A part of its matrices was computed on each machine."""
    (tmp_path / "adapter_config.json").write_text("{}")
    options, found = msgspec.structs.replace(first, lora={"mine": str(tmp_path)}), []
    for weights in (b"weights", b"Weights"):
        (tmp_path / "adapter_model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}" + weights)
        found.append(facts(options))
    assert {name for name in found[0] if found[0][name] != found[1][name]} == {"adapter mine"}


def test_a_rank_of_the_first_machine_is_refused(first: EngineOptions) -> None:
    with waiting(first), pytest.raises(RefusedError, match="there is no rank 1 on another machine"):
        join(first, 1, facts(first))


def test_a_machine_that_has_left_is_missed_and_may_start_again(first: EngineOptions) -> None:
    """Its socket counted on, so the engine began without it."""
    first = msgspec.structs.replace(first, pipeline_parallel_size=3, nnodes=3)
    second, third = (msgspec.structs.replace(first, node_rank=number) for number in (1, 2))
    there = Waiting(first)
    with contextlib.ExitStack() as stack:
        with join(second, 2, facts(second)), join(second, 3, facts(second)):
            eventually(lambda: there.missing == [2, 1])
        eventually(lambda: there.missing == [2, 1, 2])
        for machine in (third, second):
            for rank in machine.ranks_here:
                stack.enter_context(join(machine, rank, facts(machine)))
        there.thread.join(60)
        assert there.missing == [2, 1, 2, 1, 0]
        assert all(stack.enter_context(peer).getpeername() for peer in there.sockets)


def eventually(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_second_machine_of_a_number_is_refused(first: EngineOptions) -> None:
    """It took the place of the first, which took it again, for ever."""
    second = msgspec.structs.replace(first, node_rank=1)
    with waiting(first), join(second, 2, facts(second)) as link:
        with pytest.raises(RefusedError, match=r"^rank 2 has joined from 127.0.0.1: node_rank must differ$"):
            join(second, 2, facts(second))
        link.setblocking(False)
        with pytest.raises(BlockingIOError):  # it is still there
            link.recv(1)


def test_who_is_late_is_refused_and_takes_no_place(first: EngineOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    """It closed the socket of a rank that computed."""
    second = msgspec.structs.replace(first, node_rank=1)
    is_greeted, is_over, receive_exactly = threading.Event(), threading.Event(), nodes.receive_exactly

    def receive_late(*args: Any) -> bytes:
        nonce = receive_exactly(*args)
        if threading.current_thread() is late:
            is_greeted.set()
            assert is_over.wait(60)
        return nonce

    def join_late() -> None:
        with pytest.raises(RefusedError) as refused:
            join(second, 2, facts(second))
        faults.append(str(refused.value))

    faults: list[str] = []
    late = threading.Thread(target=join_late)
    monkeypatch.setattr(nodes, "receive_exactly", receive_late)
    there = Waiting(first)
    late.start()
    assert is_greeted.wait(60)
    with join(second, 2, facts(second)), join(second, 3, facts(second)):
        there.thread.join(60)
        is_over.set()
        late.join()
        assert faults == ["all machines have joined"]
        for peer in there.sockets:
            peer.close()


def test_a_first_machine_that_does_not_acknowledge_is_given_up(first: EngineOptions) -> None:
    """While a rank told of its progress, keep-alive did not find that the other machine was gone."""
    second = msgspec.structs.replace(first, node_rank=1)
    with waiting(first), join(second, 2, facts(second)) as link:
        assert link.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 5000


@pytest.mark.parametrize(
    "said",
    [b"GET / HTTP/1.1\r\n\r\n" * 9, (1 << 31).to_bytes(4, "little"), b"\x05\0\0\0hello", b"\x60\0\0\0" + bytes(96)],
)
def test_strangers_learn_nothing(first: EngineOptions, said: bytes) -> None:
    with waiting(first), socket.create_connection(("127.0.0.1", first.master_port)) as peer:
        peer.sendall(said)
        got = b""
        with contextlib.suppress(ConnectionResetError):
            while chunk := peer.recv(1000):
                got += chunk
        assert len(got) == 32  # the nonce


def test_silent_strangers_do_not_keep_others_out(first: EngineOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "_MAX_STRANGERS", 3)
    with waiting(first), contextlib.ExitStack() as stack, monkeypatch.context() as patch:
        patch.setattr(nodes, "HANDSHAKE_S", 0.2)
        peers = [stack.enter_context(socket.create_connection(("127.0.0.1", first.master_port))) for _ in range(5)]
        for peer in peers:
            while peer.recv(1000):
                pass


def test_who_cannot_prove_the_token_is_not_followed(first: EngineOptions) -> None:
    """An answer that is sent back, or made up, is none."""

    def answer(server: socket.socket) -> None:
        peer, _ = server.accept()
        with peer:
            peer.sendall(bytes(32))
            said = receive(peer)
            peer.sendall(b"\x20\0\0\0" + said[32:64])

    with socket.create_server(("127.0.0.1", first.master_port)) as server:
        threading.Thread(target=answer, args=(server,)).start()
        with pytest.raises(RefusedError, match="it has another nodes_token, or is not Weft"):
            join(first, 2, facts(first))


def test_an_address_of_another_machine_is_refused(first: EngineOptions) -> None:
    options = msgspec.structs.replace(first, master_addr="192.0.2.1")
    with pytest.raises(ModelError, match=r"^cannot listen on master_addr 192.0.2.1, master_port \d+: Cannot assign"):
        Gathering(options).wait(lambda number: None)


def test_the_interface_is_that_of_the_address() -> None:
    assert interface("127.0.0.1") == "lo"
    assert interface("::1") is None
