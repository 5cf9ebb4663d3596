"""What the server and a process that renders chat templates say to each other (see `template_child`).

A call is a header (length, seconds of CPU time), and the marshalled name of an operation, key and source of a template,
and arguments. The source is None where the process has seen the key. The answer is a header (length, length of its
first part), a JSON list that begins with the outcome, and the rendered text. No answer is unmarshalled, for a template
could have made it.
"""

import socket
import struct
from typing import Final

CALL: Final = struct.Struct(">Qd")
ANSWER: Final = struct.Struct(">QQ")
COMPILE, PROBE, RENDER = "compile", "probe", "render"
"""The operations."""
DONE, REFUSED, TOO_MUCH = "done", "refused", "too much"
"""The outcomes."""
MAX_FAULT_CHARS: Final = 1000
"""Of what a template says of messages, or of its own fault."""


def read_exactly(link: socket.socket, num_bytes: int) -> bytearray:
    """Read so many bytes.

    Raises:
        EOFError: The other side ended before.
        OSError: The connection is broken, or it took longer than its timeout.
    """
    content = bytearray(num_bytes)
    view, position = memoryview(content), 0
    while position < num_bytes:
        num_read = link.recv_into(view[position:])
        if not num_read:
            raise EOFError
        position += num_read
    return content
