"""Carries messages between the first rank and another one, over a stream socket of this machine or between machines.

A frame holds the number of a message's kind, then MessagePack. What comes over a network is never unpickled: it holds
values of known types alone, and arrays of the type that their field has.
"""

import contextlib
import select
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin

import numpy as np
import torch
from msgspec.msgpack import Decoder, Encoder

from weft.engine.config import EngineConfig
from weft.engine.memory_plan import MemoryPlan
from weft.engine.offload.ranked_blocks import ReadBlock, WriteBlock
from weft.engine.ranks.nodes import Ended
from weft.engine.shared.framing import frame, receive
from weft.engine.step.batch import Batch


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


Message = Ended | RankTask | MemoryPlan | Batch | LoadAdapter | AdapterEnd | ReadBlock | WriteBlock | Progress | Fault
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
