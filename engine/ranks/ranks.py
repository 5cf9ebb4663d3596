"""Starts the processes that compute a model together, watches them, and carries messages between them and the first.

Each rank has a part of every layer, some of the layers, or both. The ranks of a pipeline stage have parts of the same
layers (tensor parallelism); stages compute one after the other.

Rank 0 is the engine's process. The others are its children, and on other machines those of what follows the engine
(`node_process.py`). `ranked_runner.py` has how they compute a step. A rank that ends takes the engine with it, at once,
and the engine its ranks; so does one that makes no progress while it loads. While a rank hangs later, rank 0 waits for
it and gives no sign of life. The supervisor mends all that with a new engine.

Messages go over a stream socket of this machine or between machines. A frame holds the number of a message's kind, then
MessagePack. What comes over a network is never unpickled: it holds values of known types alone, and arrays of the type
that their field has.
"""

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, get_args, get_origin

import numpy as np
import torch
import torch.distributed as dist
from msgspec.msgpack import Decoder, Encoder
from msgspec.structs import replace as replace_fields
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in its list

from weft.engine.batch import Batch
from weft.engine.cache.block_bytes import ReadBlock, WriteBlock
from weft.engine.config import EngineConfig
from weft.engine.layers.all_ranks import StageRanks
from weft.engine.memory_plan import MemoryPlan
from weft.engine.ranks.nodes import Ended, Gathering, interface, start_rank
from weft.engine.wire.errors import ModelError
from weft.engine.wire.messages import frame, receive

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RankTask:
    """What another rank is told first; the ranks meet at a port of the first one's machine.

    Attributes:
        config: What the first rank has decided, for all; `model` is the folder there.
    """

    config: EngineConfig
    host: str
    port: int


class Progress(NamedTuple):
    """Another rank loads its part; or has loaded it."""

    is_loaded: bool


class Fault(NamedTuple):
    """Another rank cannot load its part, and ends."""

    text: str


class LoadAdapter(NamedTuple):
    """See `Executor.load_adapter`; every rank reads its part, from the same path on each machine."""

    slot: int
    folder: Path


class AdapterEnd(NamedTuple):
    """What became of `LoadAdapter` on another rank.

    Attributes:
        fault: Why it cannot load its part; None if it has.
        content: The `Adapter.content` that it read.
    """

    fault: str | None
    content: str = ""


class KeepFeatures(NamedTuple):
    """What the first rank has made of a picture; data are the values of a tensor."""

    key: bytes
    dtype: torch.dtype
    shape: tuple[int, ...]
    data: bytes


class DropFeatures(NamedTuple):
    """See `Features.drop`."""

    key: bytes


Load = Progress | Fault | LoadAdapter | AdapterEnd
Message = Ended | RankTask | MemoryPlan | Batch | Load | ReadBlock | WriteBlock | KeepFeatures | DropFeatures
_KINDS = get_args(Message)


def _encode(value: object) -> object:
    if isinstance(value, np.ndarray):
        return value.shape, value.dtype.str, value.tobytes()
    if isinstance(value, Path | torch.device):
        return str(value)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    raise NotImplementedError(f"no message holds a {type(value).__name__}")


def _decode(kind: Any, value: Any) -> object:
    if get_origin(kind) is np.ndarray:
        shape, dtype, data = value
        (wanted,) = get_args(get_args(kind)[1])
        if dtype != np.dtype(wanted).str:
            raise ValueError(f"an array of {wanted.__name__} came as {dtype}")
        return np.frombuffer(bytearray(memoryview(data)), wanted).reshape(shape)
    return getattr(torch, value) if kind is torch.dtype else kind(value)


_encoder = Encoder(enc_hook=_encode)
_decoders = [Decoder(kind, dec_hook=_decode) for kind in _KINDS]


def encode(message: Message) -> bytes:
    """A message's frame."""
    return frame(bytes([_KINDS.index(type(message))]) + _encoder.encode(message))


def decode(body: bytes) -> Message:
    """The message of a frame. Raises ValueError if it holds none."""
    if not body or body[0] >= len(_KINDS):
        raise ValueError(f"message of an unknown kind: {body[:1].hex()}")
    message: Message = _decoders[body[0]].decode(memoryview(body)[1:])
    return message


_LOOK_S = 1.0
_MAX_REPEATS = 5
"""TCP sends again after 0.2, 0.6, 1.4, 3 and 6.2 s or more; then the other machine is gone."""


class Link:
    """The messages of a socket. One thread may send while another receives."""

    def __init__(self, peer: socket.socket) -> None:
        """Take over a connected socket."""
        peer.settimeout(None)
        self._peer = peer

    def send(self, message: Message) -> None:
        """Wait until it is on its way. Raises OSError if the other end is gone."""
        self.send_frame(encode(message))

    def send_frame(self, encoded: bytes) -> None:
        """As `send`, for a message that several get."""
        self._peer.sendall(encoded)

    def has_message(self, timeout_s: float) -> bool:
        """Whether one, or the end, comes within this time."""
        poll = select.poll()
        poll.register(self._peer, select.POLLIN)
        return bool(poll.poll(timeout_s * 1e3))

    def recv(self) -> Message:
        """Wait for a message.

        Raises:
            EOFError: The other end is closed.
            OSError: It is gone, or does not acknowledge what was sent to it.
            ValueError: Something else came.
        """
        while not self.has_message(_LOOK_S):
            if self._num_repeats() >= _MAX_REPEATS:
                raise TimeoutError("its machine does not answer")
        return decode(receive(self._peer))

    def close(self) -> None:
        """The other end gets an end of file, and so does a thread that receives here."""
        with contextlib.suppress(OSError):  # it is gone
            self._peer.shutdown(socket.SHUT_RDWR)
        self._peer.close()

    def _num_repeats(self) -> int:
        """How often what is on its way was sent again; TCP_USER_TIMEOUT would also end a peer that only reads late."""
        if self._peer.family == socket.AF_UNIX:
            return 0
        return self._peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 3)[2]  # tcpi_retransmits of linux/tcp.h


_HERE = "127.0.0.1"
_MEETING = timedelta(hours=1)
"""Longest wait of a rank for others that still load."""
_SILENCE_S = 60.0
"""Longest time without progress of a rank that loads, and of the meeting when all have loaded."""
PATIENCE_S = 1.0
"""Pause before a failed step ends the engine. If it failed because another rank has ended, that is said, and ends it,
first."""


def meet(task: RankTask, store: TCPStore | None = None) -> None:
    """Meet the other ranks, on the CPU or between GPUs. Waits until all have loaded their part.

    Args:
        store: Listens at the port; the first rank has it.
    """
    if name := interface(task.host):
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", name)
    options = task.config.options
    dist.init_process_group(
        "nccl" if task.config.device.type == "cuda" else "gloo",
        store=store or TCPStore(task.host, task.port, options.num_ranks, timeout=_MEETING),
        rank=task.config.rank,
        world_size=options.num_ranks,
        timeout=timedelta(days=1),  # a shorter one is the supervisor's
    )
    StageRanks.meet(options.tensor_parallel_size)


def share_cores(config: EngineConfig) -> None:
    """Leave each rank of this machine its part of the CPU."""
    size = min(config.options.tensor_parallel_size, len(config.options.ranks_here))  # of stages one computes at a time
    if size > 1 and config.device.type == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // size))


def least_of_ranks(value: int, device: torch.device) -> int:
    """The least of the values with which all ranks call it."""
    values = torch.tensor(value, device=device)
    dist.all_reduce(values, dist.ReduceOp.MIN)
    return int(values)


class Ranks:
    """The processes of all ranks but the first: those of this machine, and those of others, which join."""

    def __init__(self, config: EngineConfig, show_missing: Callable[[int], None]) -> None:
        """Start or await them; they load their parts while this rank loads its own.

        Args:
            show_missing: Called with the number of machines that have not joined yet, when it changes.

        Raises:
            ModelError: No other machine can join here.
        """
        options, host, joined = config.options, _HERE, list[socket.socket]()
        if options.nnodes > 1:
            host, joined = Gathering(options).wait(show_missing)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, 0), family=family) as server:  # torch's own would listen at every address
            port, fd = server.getsockname()[1], os.dup(server.fileno())
        self._store = TCPStore(
            host, port, options.num_ranks, is_master=True, timeout=_MEETING, wait_for_workers=False, master_listen_fd=fd
        )
        self._task = RankTask(replace(config, options=replace_fields(options, nodes_token=None)), host, port)
        self._links: list[Link] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._loading: list[threading.Event] = []
        self._adapter_ends: list[SimpleQueue[AdapterEnd]] = []
        self._lock = threading.Lock()
        self._is_closed = False
        for _ in options.ranks_here[1:]:
            ours, theirs = socket.socketpair()
            with theirs:
                self._processes.append(start_rank(theirs, options.model))
            self._add(Link(ours), self._processes[-1])
        for peer in joined:
            self._add(Link(peer), None)

    def _add(self, link: Link, process: "subprocess.Popen[bytes] | None") -> None:
        """Take the next rank; its process is None on another machine."""
        self._links.append(link)
        self._loading.append(threading.Event())
        self._adapter_ends.append(SimpleQueue())
        rank = len(self._links)
        with contextlib.suppress(OSError):  # it is gone, which the thread finds
            link.send(RankTask(replace(self._task.config, rank=rank), self._task.host, self._task.port))
        threading.Thread(target=self._watch, args=(rank, link, process), daemon=True).start()

    def join(self) -> None:
        """Meet them when they have loaded their parts."""
        for loaded in self._loading:
            loaded.wait()
        timer = threading.Timer(_SILENCE_S, self._end, ["the ranks do not meet"])
        timer.daemon = True
        timer.start()
        meet(self._task, self._store)
        timer.cancel()

    def send(self, message: MemoryPlan | Batch | LoadAdapter | KeepFeatures | DropFeatures) -> None:
        """Give the others the plan of their memory, then batches, of which they compute their parts, and more."""
        encoded = encode(message)
        with self._lock:
            for link in self._links:
                link.send_frame(encoded)

    def check_adapter(self) -> list[str]:
        """Wait until all others have ended a load of an adapter, and return the contents that they read.

        Loads end in the order in which they were sent.

        Raises:
            ModelError: One cannot load its part.
        """
        ended = [ends.get() for ends in self._adapter_ends]
        for rank, end in enumerate(ended, 1):
            if end.fault is not None:
                raise ModelError(f"rank {rank}: {end.fault}")
        return [end.content for end in ended]

    def send_each(self, messages: Sequence[ReadBlock | WriteBlock]) -> None:
        """Give each of the others its own message. Any thread may; all ranks get what others send in one order."""
        with self._lock:
            for link, message in zip(self._links, messages, strict=True):
                link.send(message)

    def close(self) -> None:
        """End the others and wait for that."""
        self._is_closed = True
        for link in self._links:
            link.close()
        for process in self._processes:
            process.wait()
        dist.destroy_process_group()

    def _watch(self, rank: int, link: Link, process: "subprocess.Popen[bytes] | None") -> None:
        """Read the progress of a rank until it has loaded its part; then wait for its end, which is the engine's."""
        name, said = f"rank {rank}" if process else f"rank {rank} on another machine", ""
        code, loaded = -signal.SIGKILL, self._loading[rank - 1]  # the code of one that is gone with its machine
        try:  # a loading rank is waited for twice, in case that all was stopped
            while loaded.is_set() or link.has_message(_SILENCE_S) or link.has_message(PATIENCE_S):
                message = link.recv()
                if isinstance(message, Fault):
                    said = f": {message.text}"
                elif isinstance(message, Ended):
                    code = message.code
                    break
                elif message == Progress(is_loaded=True):
                    loaded.set()
                elif isinstance(message, AdapterEnd):
                    self._adapter_ends[rank - 1].put(message)
            else:
                self._end(f"{name} makes no progress while it loads its part")
        except TimeoutError as error:
            said = f": {error}"
        except (EOFError, OSError, ValueError):
            pass
        self._adapter_ends[rank - 1].put(AdapterEnd("it has ended"))  # nobody shall wait for it
        code = process.wait() if process else code
        if not self._is_closed:
            logger.error("%s has ended (%d)%s, and the engine ends with it", name, code, said)
            if code < 0:  # as the rank did, which tells the supervisor whether a request is to blame
                os.kill(os.getpid(), -code)
            os._exit(max(code, 1))  # if it could not load its part, the code says so

    def _end(self, why: str) -> None:
        self._is_closed = True
        logger.error("%s, and the engine ends", why)
        for process in self._processes:
            process.kill()  # one that is stopped may not have learned to die with its parent
            process.wait()
        os._exit(1)
