"""Shows downloads: a bar for each file on a terminal, lines elsewhere. Imports little, since every start does so."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from weft.server.library.download import Remote, Report
from weft.server.library.library import Lines

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


@contextlib.contextmanager
def shown_progress(tell: Callable[[str], None], *, has_bars: bool = True) -> Iterator[Report]:
    """What shows downloads until the end of the context: bars on a terminal, elsewhere lines that `tell` is given."""
    is_terminal = sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    if not (has_bars and is_terminal):
        yield Lines(tell)
        return
    with contextlib.ExitStack() as stack:
        bars: list[Progress] = []
        tasks: dict[str, TaskID] = {}

        def report(remote: Remote, num_bytes: int) -> None:
            if not bars:  # nothing is shown, or imported, before there is something to fetch
                bars.append(stack.enter_context(_bars()))
            if remote.name not in tasks:
                tasks[remote.name] = bars[0].add_task(remote.name.rpartition("/")[2], total=remote.size)
            bars[0].update(tasks[remote.name], completed=num_bytes)

        yield report


def _bars() -> "Progress":
    from rich import progress
    from rich.console import Console

    columns = (progress.TextColumn("{task.description}"), progress.BarColumn(), progress.DownloadColumn())
    speed = (progress.TransferSpeedColumn(), progress.TimeRemainingColumn())
    return progress.Progress(*columns, *speed, console=Console(stderr=True))
