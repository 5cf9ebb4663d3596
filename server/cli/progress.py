"""Shows downloads: a bar for each file on a terminal, lines elsewhere. Imports little, since every start does so."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator

from weft.server.library.download import Remote, Report
from weft.server.library.library import Lines


class _Bars:
    """Shows a bar for each file, with the bytes of that file. Opens the terminal's display when the first one comes."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._tasks: dict[str, Callable[[int], None]] = {}
        self._add: Callable[[Remote, int], Callable[[int], None]] | None = None

    def __call__(self, remote: Remote, num_bytes: int) -> None:
        self._add = self._add or self._open()
        if remote.name not in self._tasks:
            self._tasks[remote.name] = self._add(remote, num_bytes)
        self._tasks[remote.name](num_bytes)

    def _open(self) -> Callable[[Remote, int], Callable[[int], None]]:
        from rich import progress  # slow to import
        from rich.console import Console

        columns = (progress.TextColumn("{task.description}"), progress.BarColumn(), progress.DownloadColumn())
        more = (progress.TransferSpeedColumn(), progress.TimeRemainingColumn())
        bars = self._stack.enter_context(progress.Progress(*columns, *more, console=Console(stderr=True)))

        def add(remote: Remote, num_bytes: int) -> Callable[[int], None]:
            name = remote.name.rpartition("/")[2]
            task = bars.add_task(name, total=remote.size, completed=num_bytes)
            return lambda completed: bars.update(task, completed=completed)

        return add


@contextlib.contextmanager
def shown_progress(tell: Callable[[str], None], *, has_bars: bool = True) -> Iterator[Report]:
    """What shows downloads until the end of the context: bars on a terminal, elsewhere lines that `tell` is given."""
    with contextlib.ExitStack() as stack:
        is_terminal = sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        yield _Bars(stack) if has_bars and is_terminal else Lines(tell)
