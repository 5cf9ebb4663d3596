"""Follows the engine on the first of several machines: joins it, starts this machine's ranks, and waits for their end.

In the place of an engine under a supervisor that has no servers. A rank that ends takes the others of this machine with
it, and so does the end of the engine; then this joins again, until SIGTERM: it leaves at once if it has not joined, and
otherwise when the engine ends. The status page says that it is ready while it has joined. Imports no torch.
"""

import contextlib
import logging
import os
import pathlib
import select
import signal
import socket
import sys
import time

import msgspec

from weft.engine.ranks.nodes import Ended, RefusedError, facts, join, start_rank
from weft.engine.wire import errors as logs
from weft.engine.wire.messages import STATUS_NAME, EngineOptions
from weft.engine.wire.status_page import Status, StatusPage

_RETRY_S = 1.0

logger = logging.getLogger(__name__)


class Node:
    """This machine's ranks."""

    def __init__(self, page: StatusPage, options: EngineOptions) -> None:
        """Start nothing."""
        self._page = page
        self._options = options
        self._facts = facts(options)
        self._is_leaving = False
        self._said = ""

    def leave(self, *_: object) -> None:
        """End when the engine does."""
        self._is_leaving = True

    def run(self) -> None:
        """Follow one engine after the other until `leave`."""
        while not self._is_leaving:
            try:
                links = self._join()
            except (OSError, EOFError, RefusedError) as error:
                self._say_once(f"cannot join yet: {error}")
                time.sleep(_RETRY_S)
            else:
                self._follow(links)

    def _join(self) -> list[socket.socket]:
        with contextlib.ExitStack() as stack:
            links = [stack.enter_context(join(self._options, r, self._facts)) for r in self._options.ranks_here]
            stack.pop_all()
            return links

    def _follow(self, links: list[socket.socket]) -> None:
        self._say_once("has joined")
        ranks = self._options.ranks_here
        processes = [start_rank(link, self._options.model) for link in links]
        self._write(is_ready=1)
        poll = select.poll()
        with contextlib.ExitStack() as stack:
            for link, process in zip(links, processes, strict=True):
                poll.register(stack.enter_context(link), select.POLLRDHUP)  # what comes is for the rank to read
                poll.register(stack.enter_context(open(os.pidfd_open(process.pid))), select.POLLIN)
            poll.poll()
            ended = [(rank, code) for rank, process in zip(ranks, processes, strict=True) if (code := process.poll())]
            for rank, code in ended:
                with contextlib.suppress(OSError):  # the engine has ended, too
                    links[rank - ranks[0]].sendall(Ended(code).encode())
            for process in processes:
                process.kill()
                process.wait()
        self._write(is_ready=0)
        self._say_once("; ".join(f"rank {rank} has ended ({code})" for rank, code in ended) or "the engine has ended")

    def _write(self, is_ready: int) -> None:
        self._page.write(Status(epoch_id=os.getpid(), is_ready=is_ready, progress_time=time.monotonic()))

    def _say_once(self, what: str) -> None:
        if what != self._said:
            self._said = what
            options = self._options
            logger.info("machine %d, %s port %d: %s", options.node_rank, options.master_addr, options.master_port, what)


def main(runtime_dir: pathlib.Path) -> int:
    """Follow with the options that the supervisor writes to standard input."""
    options = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineOptions)
    logs.configure(options.log_format, "engine")
    node = Node(StatusPage(runtime_dir / STATUS_NAME), options)
    signal.signal(signal.SIGTERM, node.leave)
    node.run()
    return 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1])))
