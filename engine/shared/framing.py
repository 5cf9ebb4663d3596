"""Cuts the stream between server and engine into frames: four bytes of length (little endian), then the body."""

import socket
import struct
import time

MAX_FRAME_BYTES = 256 << 20
"""A longer frame means that the two ends are out of sync. The reader closes the connection."""

_LENGTH = struct.Struct("<I")
_CHUNK_BYTES = 1 << 20


def frame(body: bytes) -> bytes:
    """One frame, length included."""
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Cuts a byte stream into frame bodies. Owns the bytes of the frame that is not yet whole."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Take bytes as they arrive; return the bodies that are now whole, in order.

        Raises:
            ValueError: A frame says that it is longer than MAX_FRAME_BYTES.
        """
        buffer = self._buffer
        buffer += data
        bodies: list[bytes] = []
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"frame of {length} bytes, at most {MAX_FRAME_BYTES} allowed")
            end = start + _LENGTH.size + length
            if len(buffer) < end:
                break
            bodies.append(bytes(buffer[start + _LENGTH.size : end]))
            start = end
        del buffer[:start]
        return bodies


def receive(peer: socket.socket, max_bytes: int = MAX_FRAME_BYTES, deadline: float | None = None) -> bytes:
    """Wait for one frame on a blocking socket and return its body.

    Args:
        deadline: `time.monotonic` by which it must be whole; None: whenever it comes.

    Raises:
        EOFError: The stream ends.
        OSError: The peer is gone, or the frame is late.
        ValueError: The frame says that it is longer than max_bytes.
    """
    (length,) = _LENGTH.unpack(receive_exactly(peer, _LENGTH.size, deadline))
    if length > max_bytes:
        raise ValueError(f"frame of {length} bytes, at most {max_bytes} allowed")
    return receive_exactly(peer, length, deadline)


def receive_exactly(peer: socket.socket, num_bytes: int, deadline: float | None = None) -> bytes:
    """As `receive`, without a length before the bytes. Takes no more memory than what has come."""
    data = bytearray()
    while len(data) < num_bytes:
        if deadline is not None:
            peer.settimeout(max(deadline - time.monotonic(), 1e-3))
        if not (chunk := peer.recv(min(num_bytes - len(data), _CHUNK_BYTES))):
            raise EOFError
        data += chunk
    return bytes(data)
