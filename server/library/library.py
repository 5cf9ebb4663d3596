"""The library: models that were fetched, in folders that several servers may share.

Those of the hub are in the cache of its own tools (`hub`), those of other web servers in a folder of Weft's (`web`).
Downloads are shown here, too: in lines, or as bars on a terminal.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from weft.engine.gguf.file import part_names
from weft.engine.wire.machine import format_size
from weft.server.library import hub, web
from weft.server.library.contents import Facts, facts_of, gguf_type, is_whole
from weft.server.library.download import LibraryError, NotHereError, Remote, Report
from weft.server.library.names import OnHub, OnWeb, Source, alike, known_models, models_folder, parse

Check = Callable[[Path], None]

_SHOWN_BYTES = 1_000_000
_TELL_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class Entry:
    """A model of the library.

    Attributes:
        name: By which every command finds it.
        place: The folder of the checkpoint, or the first file of the GGUF model.
    """

    name: str
    place: Path
    facts: Facts


class Lines:
    """Tells of downloads in lines: the beginning and the end of a file, and every few seconds how far it is."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        """Say each line to `tell`."""
        self._tell, self._name, self._due_time = tell, "", 0.0

    def __call__(self, remote: Remote, num_bytes: int) -> None:
        """Take note of what is there of a file."""
        now, is_end = time.monotonic(), num_bytes == remote.size
        if remote.size < _SHOWN_BYTES or (remote.name == self._name and now < self._due_time and not is_end):
            return
        self._name, self._due_time = remote.name, now + _TELL_EVERY_S
        self._tell(f"Fetching {remote.name}: {format_size(num_bytes)} of {format_size(remote.size)}")


@contextlib.contextmanager
def shown_progress(tell: Callable[[str], None], *, has_bars: bool = True) -> Iterator[Report]:
    """What shows downloads until the end of the context: bars on a terminal, elsewhere lines that `tell` is given."""
    is_terminal = sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    if not (has_bars and is_terminal):
        yield Lines(tell)
        return
    with contextlib.ExitStack() as stack:

        @cache
        def bars() -> Any:  # nothing is shown, or imported, before there is something to fetch
            from rich import progress
            from rich.console import Console

            columns = (progress.TextColumn("{task.description}"), progress.BarColumn(), progress.DownloadColumn())
            speed = (progress.TransferSpeedColumn(), progress.TimeRemainingColumn())
            return stack.enter_context(progress.Progress(*columns, *speed, console=Console(stderr=True)))

        task = cache(lambda name, size: bars().add_task(name.rpartition("/")[2], total=size))
        yield lambda remote, num_bytes: bars().update(task(remote.name, remote.size), completed=num_bytes)


def find(source: Source, *, is_plan: bool = False) -> Path | None:
    """Where a model is; None if it is not there, or not whole. A plan is content with a configuration."""
    match source:
        case OnHub():
            folder = hub.snapshot(source.repository) if is_plan and source.file is None else None
            has_config = folder is not None and (folder / "config.json").is_file()
            return folder if has_config else hub.cached(source)
        case OnWeb():
            return web.cached(source.place)
        case Path():
            return source


def get(
    name: str | OnHub,
    report: Report,
    check: Check = lambda folder: None,
    *,
    is_plan: bool = False,
    refresh: bool = False,
    is_seeing: bool = True,
) -> Path:
    """Where a model is, after fetching what is missing.

    Args:
        name: What people type for it.
        check: See `hub.fetch`.
        is_plan: A configuration will do, where there is one without the weights.
        refresh: Ask the hub for a newer version also if the model is there.
        is_seeing: See `hub.fetch`.

    Raises:
        LibraryError: It is nowhere, or cannot be fetched.
    """
    source = parse(name) if isinstance(name, str) else name
    if not (refresh and isinstance(source, OnHub)) and (found := find(source, is_plan=is_plan)):
        return found
    if isinstance(source, OnWeb):
        return web.fetch(source, report)
    assert isinstance(source, OnHub), "a path is found"
    try:
        return hub.fetch(source, report, check, is_plan=is_plan, is_seeing=is_seeing)
    except LibraryError:
        if not refresh and (found := hub.cached(source, None)):
            return found
        raise


def entries() -> Iterator[Entry]:
    """Every model that is there as a whole, by name."""
    short = {known.source.lower(): known.name for known in known_models()}
    found: dict[str, Path] = {}
    for repository in hub.repositories():
        if (snapshot := hub.snapshot(repository)) is None:
            continue
        if is_whole(snapshot):
            found[repository] = snapshot
        for file in snapshot.rglob("*.gguf"):
            tag = gguf_type(file.name) or file.name
            if part_names(file.name)[:1] == [file.name] and hub.cached(OnHub(repository, tag)) == file:
                found[f"{repository}:{tag}"] = file
    for file in models_folder().rglob("*.gguf"):
        place = file.relative_to(models_folder()).as_posix()
        if part_names(file.name)[:1] == [file.name] and web.cached(place):
            found[place] = file
    for name in sorted(found, key=str.lower):
        yield Entry(short.get(name.lower(), name), found[name], facts_of(found[name]))


def remove(name: str | OnHub) -> None:
    """Remove a model, also what is there of one that is not whole.

    Raises:
        LibraryError: It is not there, is no model of the library, or somebody is fetching it.
    """
    here = [entry.name for entry in entries()]
    match source := parse(name, here) if isinstance(name, str) else name:
        case OnHub() if hub.repository_folder(source.repository).is_dir():
            hub.remove(source)
        case OnWeb() if (models_folder() / source.place).parent.is_dir():
            web.remove(source.place)
        case Path():
            raise LibraryError(f"{source} is no model of the library: remove its files yourself")
        case _:
            raise NotHereError(f"{source} is not in the library{alike(str(source), here)}; `weft list` shows what is")
