"""What the supervisor publishes about the served models, and what server processes ask of it.

The supervisor alone writes the state: one file, replaced as a whole. Server processes read it whenever they look up a
model, which costs a `stat` unless it has changed. They ask with small files, and with a signal that nobody must heed.
An ask has no reply but the next state; equal asks are one.
"""

import contextlib
import hashlib
import logging
import os
import pathlib
import signal
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import wait
from functools import partial
from typing import Literal

import msgspec

from weft.engine.wire.errors import ModelError
from weft.engine.wire.options import ADAPTER_S, MAX_ADAPTERS, Adapter, find_adapter
from weft.engine.wire.waiting_threads import WaitingThreads
from weft.server.model_entry import MAX_MODELS
from weft.server.settings import Settings, StartError

STATE_NAME, ASKS_NAME = "models.json", "asks"
ASK_SIGNAL = signal.SIGURG
"""Tells the supervisor that there are asks. Ignored by every other process."""

ASK_EVERY_S = 1.0
"""As long as somebody waits, the supervisor is asked this often: what nobody asks for any more is not loaded."""

_TELL_S = 10.0
"""After which the log says what the start waits for."""
_MAX_READ_AT_ONCE = 32
"""Adapters; one more waits if as many disks hang."""

logger = logging.getLogger(__name__)

State = Literal["unloaded", "loading", "ready", "unloading", "failed"]


class ModelState(msgspec.Struct, frozen=True):
    """The state of a model.

    Attributes:
        message: Why it failed.
        num_failures: How often it could not be loaded.
        num_unloaded: How often it was unloaded; requests that wait for it may have it loaded again at once.
        retry_time: After a failure, `time.monotonic` before which no request tries again.
        memory_bytes: What it takes while it is loaded, as planned; None: it may take what it finds.
        last_used: When it was last seen to work, in seconds since 1970; None: never.
    """

    state: State
    message: str = ""
    num_failures: int = 0
    num_unloaded: int = 0
    retry_time: float = 0.0
    memory_bytes: int | None = None
    last_used: float | None = None


class ServedAdapter(msgspec.Struct, frozen=True):
    """An adapter, and the own name of the model that it belongs to."""

    model: str
    adapter: Adapter


class FleetState(msgspec.Struct, frozen=True):
    """All models by their own names, which of these each alias means, and the adapters by name."""

    models: Mapping[str, ModelState]
    aliases: Mapping[str, str]
    adapters: Mapping[str, ServedAdapter] = {}


class Ask(msgspec.Struct, frozen=True):
    """What the supervisor is asked.

    Attributes:
        alias: Is given to the model, if that is the kind.
        adapter: Is served from now on, or no longer.
        replaces: Whether another adapter of the model may have had that name.
    """

    kind: Literal["load", "unload", "alias", "add adapter", "drop adapter"]
    model: str
    alias: str = ""
    adapter: Adapter | None = None
    replaces: bool = False


def first_state(settings: Settings) -> FleetState:
    """The state before anything is started. Reads the files of adapters.

    Raises:
        StartError: The disk of one does not answer.
    """
    models = {name: ModelState("loading" if e.load == "always" else "unloaded") for name, e in settings.fleet.items()}
    aliases = {alias: name for name, entry in settings.fleet.items() for alias in entry.aliases}
    loras = [(model, *lora) for model in settings.fleet for lora in settings.for_model(model).lora.items()]
    threads = WaitingThreads("adapters", _MAX_READ_AT_ONCE)
    found = {name: threads.submit(partial(_found, name, pathlib.Path(folder))) for _, name, folder in loras}
    if late := wait(found.values(), _TELL_S).not_done:
        folders = ", ".join(folder for _, name, folder in loras if found[name] in late)
        logger.warning("still reading the files of adapters, for at most %g s: %s", ADAPTER_S, folders)
    late = wait(found.values(), ADAPTER_S).not_done
    for _, name, folder in loras:
        if found[name] in late:
            raise StartError(f"lora: {name}: the files in {folder} are not read within {ADAPTER_S:g} s")
    adapters = {name: ServedAdapter(model, found[name].result()) for model, name, _ in loras}
    return FleetState(models, aliases, adapters)


def _found(name: str, folder: pathlib.Path) -> Adapter:
    """What is served under a name that is configured. If it is gone, its engine says so."""
    try:
        return find_adapter(name, folder)
    except ModelError:
        return Adapter(name, str(folder), "")


def may_be_alias(alias: str, state: FleetState) -> bool:
    """Whether an alias may be set: it is no other model's or adapter's name, and there are not too many."""
    is_free = alias not in state.models and alias not in state.adapters
    return is_free and (alias in state.aliases or len(state.aliases) < MAX_MODELS)


def adapter_fault(asked: ServedAdapter, state: FleetState, *, replaces: bool) -> str | None:
    """Why an adapter cannot be served under its name; None if it can."""
    name, served = asked.adapter.name, state.adapters.get(asked.adapter.name)
    if name in state.models or name in state.aliases:
        return f"lora_name must not be the name of a model, got {name}"
    if served is None and len(state.adapters) >= MAX_ADAPTERS:
        return f"lora_name: at most {MAX_ADAPTERS} adapters are served at once: unload one first"
    if served is None or served == asked or (replaces and served.model == asked.model):
        return None
    return (
        f"lora_name {name} is already an adapter of {served.model} from {served.adapter.folder}: unload it first, or "
        "replace one of the same model with load_inplace"
    )


def publish(runtime_dir: pathlib.Path, state: FleetState) -> None:
    """Replace the state. Only the supervisor does."""
    path = runtime_dir / f"{STATE_NAME}.new"
    path.write_bytes(msgspec.json.encode(state))
    now = time.time_ns()  # finer than the kernel's clock of files, by which readers see that it has changed
    os.utime(path, ns=(now, now))
    path.replace(runtime_dir / STATE_NAME)


def take_asks(runtime_dir: pathlib.Path) -> Iterator[Ask]:
    """What has been asked since the last call."""
    for path in (runtime_dir / ASKS_NAME).glob("*.json"):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            data = path.read_bytes()
            path.unlink()  # before it is obeyed: what is asked from now on is asked again
            yield msgspec.json.decode(data, type=Ask)


class Fleet:
    """The models as a server process sees them."""

    def __init__(self, runtime_dir: pathlib.Path, settings: Settings) -> None:
        """Until the supervisor has written to the folder, the state is the one at the start."""
        self._path = runtime_dir / STATE_NAME
        self._asks = runtime_dir / ASKS_NAME
        self._seen: tuple[int, int] | None = None  # inode and time of what was read; None: nothing yet
        self._settings = settings
        self._state: FleetState | None = None

    def read(self) -> FleetState:
        """The latest state."""
        with contextlib.suppress(OSError):  # not yet written, or the folder is gone
            stat = self._path.stat()
            if (stat.st_ino, stat.st_mtime_ns) != self._seen:
                self._state = msgspec.json.decode(self._path.read_bytes(), type=FleetState)
                self._seen = stat.st_ino, stat.st_mtime_ns
        if self._state is None:
            self._state = first_state(self._settings)
        return self._state

    def ask(self, ask: Ask) -> None:
        """Ask the supervisor, which is this process's parent. Does not wait."""
        data = msgspec.json.encode(ask)
        name = hashlib.blake2s(data, digest_size=16).hexdigest()
        with contextlib.suppress(OSError):  # without the folder nobody can obey; who waits for it says so
            path = self._asks / f"{name}.{os.getpid()}"
            path.write_bytes(data)
            path.replace(self._asks / f"{name}.json")
            os.kill(os.getppid(), ASK_SIGNAL)
