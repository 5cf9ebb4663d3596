"""The process that compiles and renders chat templates: `python -m weft.server.text.template_child BYTES`.

A template is foreign code, so the kernel bounds it: the address space may grow by BYTES, and a signal ends the process
when a call has used its time, even inside a filter that is written in C. It owns nothing that others need. It serves
one call at a time from standard input, which is a socket, and ends when that is closed. It also ends by itself after a
call that left it large. Its owner starts another then (see `template_process`).
"""

import gc
import json
import marshal
import signal
import socket
import sys
from typing import Any, Final

from weft.server.child_limits import address_bytes, bound_this_process
from weft.server.text import template_calls as calls
from weft.server.text.template_renderer import RefusedError, TemplateRenderer
from weft.server.text.template_sandbox import TemplateSourceError

MAX_CHARS: Final = 1 << 27
"""Of what is rendered: four times the largest body."""
MAX_TEMPLATES: Final = 64
"""A process that has compiled more ends."""
_SHARE_TO_END: Final = 4
"""A process that has kept one part in so many of its memory ends."""


def main(max_bytes: int) -> None:
    """Serve until the socket is closed.

    Args:
        max_bytes: By which this process may grow.
    """
    start = bound_this_process(max_bytes)
    gc.set_threshold(100_000)  # a conversation is many objects, and none is garbage before it is rendered
    link, renderers = socket.socket(fileno=0), dict[int, TemplateRenderer]()
    while len(renderers) <= MAX_TEMPLATES and address_bytes() < start + max_bytes // _SHARE_TO_END:
        try:
            num_bytes, seconds = calls.CALL.unpack(calls.read_exactly(link, calls.CALL.size))
        except (EOFError, OSError):
            return
        signal.setitimer(signal.ITIMER_PROF, seconds)  # which ends this process, whatever it is doing
        try:
            head, text = _answer(marshal.loads(calls.read_exactly(link, num_bytes)), renderers)
            body, has_memory = text.encode(), True
        except UnicodeEncodeError:
            fault = "the chat template writes half a surrogate, which is no text"
            head, body, has_memory = [calls.REFUSED, fault], b"", True
        except MemoryError:
            head, body, has_memory = [calls.TOO_MUCH, f"it takes more than {max_bytes >> 20} MiB of memory"], b"", False
        first = json.dumps(head).encode()
        link.sendall(calls.ANSWER.pack(len(first) + len(body), len(first)) + first)
        link.sendall(body)
        signal.setitimer(signal.ITIMER_PROF, 0)
        if not has_memory:
            return


def _answer(
    call: tuple[str, int, str, tuple[Any, ...]], renderers: dict[int, TemplateRenderer]
) -> tuple[list[object], str]:
    """The outcome of a call, with what belongs to it, and the rendered text."""
    operation, key, source, arguments = call
    try:
        renderer = renderers.get(key)
        if renderer is None:
            renderer = renderers[key] = TemplateRenderer(source)
        if operation == calls.COMPILE:
            return [calls.DONE, sorted(renderer.names), sorted(renderer.variables)], ""
        if operation == calls.PROBE:
            assert renderer.forms  # which are found now
            return [calls.DONE], ""
        text = renderer.render(*arguments)
    except (RefusedError, TemplateSourceError) as error:
        return [calls.REFUSED, str(error)[: calls.MAX_FAULT_CHARS]], ""
    if len(text) > MAX_CHARS:
        return [calls.TOO_MUCH, f"it writes more than {MAX_CHARS} characters"], ""
    return [calls.DONE, renderer.notes], text


if __name__ == "__main__":
    main(int(sys.argv[1]))
