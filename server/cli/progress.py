"""Shows downloads: a bar for each file on a terminal, lines elsewhere. Imports little, since every start does so."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING

from weft.server.library.download import Report
from weft.server.library.library import Lines

if TYPE_CHECKING:
    from rich.progress import Progress


@contextlib.contextmanager
def shown_progress(tell: Callable[[str], None], *, has_bars: bool = True) -> Iterator[Report]:
    """What shows downloads until the end of the context: bars on a terminal, elsewhere lines that `tell` is given."""
    is_terminal = sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    if not (has_bars and is_terminal):
        yield Lines(tell)
        return
    with contextlib.ExitStack() as stack:
        bars = cache(lambda: stack.enter_context(_bars()))  # not before there is something to fetch
        task = cache(lambda name, size: bars().add_task(name.rpartition("/")[2], total=size))
        yield lambda remote, num_bytes: bars().update(task(remote.name, remote.size), completed=num_bytes)


def _bars() -> "Progress":
    from rich import progress
    from rich.console import Console

    columns = (progress.TextColumn("{task.description}"), progress.BarColumn(), progress.DownloadColumn())
    speed = (progress.TransferSpeedColumn(), progress.TimeRemainingColumn())
    return progress.Progress(*columns, *speed, console=Console(stderr=True))
