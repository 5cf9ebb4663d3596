"""Cuts the stream between server and engine into frames: four bytes of length (little endian), then the body."""

import struct

MAX_FRAME_BYTES = 256 << 20
"""A longer frame means that the two ends are out of sync. The reader closes the connection."""

_LENGTH = struct.Struct("<I")


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
