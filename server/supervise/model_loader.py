"""Decides which models are loaded: the supervisor's part of several models in one server.

Owns the state of every model and the table of aliases, and publishes both. A model that is always loaded is never
touched. One that is loaded on demand is started once it is asked for and has room. If it has none, the least recently
used of its kind leave first, idle ones before others: they get no new requests, answer what they have accepted, and
end. So what is loaded together never takes more than was planned. Starts and reaps nothing, and never waits.
"""

import contextlib
import logging
import pathlib
import signal
import time
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from weft.engine.wire.status_page import Status
from weft.server.model_entry import ModelEntry
from weft.server.models import fleet
from weft.server.settings import Settings
from weft.server.supervise.child import Child, EngineProcess
from weft.server.supervise.memory_shares import EvictionPlan

EXIT_CANNOT_LOAD = 2
MAX_FAILURES = 3
"""An engine that ends this often before it is ready has failed."""
RETRY_S = 30.0
"""After a failure, requests do not try again for this long."""
_WANTED_S = 5 * fleet.ASK_EVERY_S
"""A model that nobody has asked for again within this time is not wanted any more."""
_HOLD_S = 5.0
"""A loaded model may stay this long to get its first request, or it would be sent away before it served any."""
_SILENT_S = 900.0
"""An engine that loads and shows nothing new for this long hangs. It may compile kernels for minutes."""
_LOOK_S = 1.0
_BUSY_LOOK_S = 0.05

logger = logging.getLogger(__name__)


class _Model:
    """One that is loaded on demand, or always. Only the loader mutates it."""

    def __init__(self, entry: ModelEntry, engine: EngineProcess, state: fleet.ModelState) -> None:
        self.on_demand = entry.load == "on-demand"
        self.unload_after = entry.unload_after
        self.engine = engine
        self.state = state
        self.used_time = 0.0  # when it last became ready, or was seen to work
        self.has_worked = False  # since it became ready
        self.seen = (0, 0)
        self.shown = (0, 0)  # what it last showed while it loaded: its process and the bytes
        self.shown_time = 0.0
        self.hangs = False  # and is killed for it

    def look(self, now: float) -> Status:
        """Note whether it has worked since the last look."""
        status = self.engine.status
        seen = status.epoch_id, status.num_steps + status.num_requests_waiting
        if status.has_work or (seen != self.seen and seen[1]):
            self.used_time, self.has_worked = now, True
            self.state = replace(self.state, last_used=float(int(time.time())))
        self.seen = seen
        return status

    def is_silent(self, status: Status, now: float) -> bool:
        """Whether its engine loads, and has shown nothing new for too long."""
        shown = self.engine.child.pid or 0, status.loaded_bytes
        if self.state.state != "loading" or shown != self.shown:
            self.shown, self.shown_time, self.hangs = shown, now, False
        self.hangs = now - self.shown_time >= _SILENT_S
        return self.hangs


class ModelLoader:
    """The supervisor calls `look` whenever it wakes, and `note_end` when an engine has ended."""

    def __init__(
        self,
        settings: Settings,
        runtime_dir: pathlib.Path,
        engines: Mapping[str, EngineProcess],
        room: EvictionPlan,
        faults: Mapping[str, str],
    ) -> None:
        """Let the engines of models on demand rest. `faults`: why some of them could not be planned."""
        self._runtime_dir = runtime_dir
        self._room = room
        self._faults = faults
        state = fleet.first_state(settings)
        self._aliases = dict(state.aliases)
        self._adapters = dict(state.adapters)
        self._models = {
            name: _Model(settings.fleet[name], engine, replace(state.models[name], memory_bytes=room.num_bytes(name)))
            for name, engine in engines.items()
        }
        self._wanted: dict[str, float] = {}  # until when, the longest wanted first
        self._published: fleet.FleetState | None = None
        for model in self._models.values():
            if model.on_demand:
                model.engine.rest()
        self._publish()

    @property
    def are_ready(self) -> bool:
        """Whether all models that are always loaded are."""
        return all(model.engine.status.is_ready for model in self._models.values() if not model.on_demand)

    @property
    def children_on_demand(self) -> Sequence[Child]:
        """Those that end nothing but themselves."""
        return [model.engine.child for model in self._models.values() if model.on_demand]

    def wait_s(self) -> float | None:
        """Seconds in which nothing is to be done; None: for ever."""
        states = {model.state.state for model in self._models.values() if model.on_demand}
        if self._wanted or states & {"loading", "unloading"}:
            return _BUSY_LOOK_S
        return _LOOK_S if "ready" in states else None

    def note_end(self, child: Child, code: int) -> bool:
        """Tidy up after an engine on demand that has ended; False: it is to be restarted, or is none."""
        found = next(((n, m) for n, m in self._models.items() if m.engine.child is child), None)
        if found is None:
            return False
        name, model = found
        was = model.state.state
        self._set(model, "loading")
        if not model.on_demand:
            return False
        if was == "unloading":
            self._left(name)
        elif model.hangs:
            self._fail(name, f"its engine showed no progress for {_SILENT_S:g} s")
        elif code == EXIT_CANNOT_LOAD or (was == "loading" and child.num_deaths >= MAX_FAILURES):
            message = model.engine.take_fault() or f"its engine ended {child.num_deaths} times before it was ready"
            self._fail(name, message)
        else:
            return False
        model.engine.rest()
        return True

    def look(self) -> None:
        """Obey what was asked, see what has become of the engines, and publish what has changed."""
        now = time.monotonic()
        for ask in fleet.take_asks(self._runtime_dir):
            self._obey(ask, now)
        for name, model in self._models.items():
            status = model.look(now)
            if model.on_demand and model.is_silent(status, now):
                model.engine.child.send_signal(signal.SIGKILL)  # `note_end` says that it has failed
            if model.state.state == "loading" and status.is_ready:
                self._set(model, "ready")
                model.used_time, model.has_worked, model.seen = now, False, (0, 0)
                if model.on_demand:  # what ends from now on was ready before
                    model.engine.child.num_deaths = 0
            idle_s = now - model.used_time
            if (
                model.state.state == "ready"
                and model.unload_after
                and not status.has_work
                and idle_s >= model.unload_after
            ):
                self._leave(name, f"it was idle for {model.unload_after:g} s")
        self._wanted = {name: until for name, until in self._wanted.items() if until > now}
        self._make_room(now)
        self._publish()

    def _obey(self, ask: fleet.Ask, now: float) -> None:
        model = self._models.get(ask.model)
        if model is None:
            return
        state = model.state.state
        if ask.kind == "load" and state in ("unloaded", "unloading", "failed"):
            self._wanted[ask.model] = now + _WANTED_S
        elif ask.kind == "unload" and model.on_demand and state in ("loading", "ready"):
            self._wanted.pop(ask.model, None)
            self._leave(ask.model, "it was asked for")
        elif ask.kind == "alias" and fleet.may_be_alias(ask.alias, self._state):
            self._aliases[ask.alias] = ask.model
            logger.info("%s is the model %s from now on", ask.alias, ask.model)
        elif ask.adapter is not None:
            self._obey_adapter(ask.kind, fleet.ServedAdapter(ask.model, ask.adapter), replaces=ask.replaces)

    def _obey_adapter(self, kind: str, asked: fleet.ServedAdapter, *, replaces: bool) -> None:
        name = asked.adapter.name
        served = self._adapters.get(name)
        if kind == "add adapter" and served != asked and not fleet.adapter_fault(asked, self._state, replaces=replaces):
            self._adapters[name] = asked
            logger.info("%s is the adapter in %s of %s from now on", name, asked.adapter.folder, asked.model)
        elif kind == "drop adapter" and served == asked:
            del self._adapters[name]
            logger.info("%s is served no longer", name)

    def _make_room(self, now: float) -> None:
        """Start what is wanted and fits, and send away those that it needs the room of."""
        going = [name for name, model in self._models.items() if model.state.state == "unloading"]
        there = [name for name, model in self._models.items() if model.state.state in ("loading", "ready")] + going
        full: set[str] = set()  # devices whose room is kept for a model that was wanted before
        for name in list(self._wanted):
            model, device = self._models[name], self._room.device(name)
            if model.state.state == "unloading" or device in full:
                continue
            if name in self._faults:  # what it takes is not known, so nothing can be promised
                del self._wanted[name]
                self._fail(name, self._faults[name])
                continue
            if self._room.lack(name, there) <= 0:
                del self._wanted[name]
                logger.info("Loading the model %s", name)
                self._set(model, "loading")
                model.engine.child.due_time = 0.0
                there.append(name)
                continue
            leavers = self._room.leavers(name, there, going, self._may_leave(now))
            for leaver in leavers or ():
                self._leave(leaver, f"{name} needs its room")
                going.append(leaver)
            if leavers is not None:
                there.append(name)  # it has that room: no other wanted one may count on it
            elif device:
                full.add(device)

    def _may_leave(self, now: float) -> Sequence[str]:
        """Those that may be sent away, idle ones first, then the least recently used ones."""
        found = [
            (bool(model.engine.status.has_work), model.used_time, name)
            for name, model in self._models.items()
            if model.on_demand
            and model.state.state == "ready"
            and (model.has_worked or now - model.used_time >= _HOLD_S)
        ]
        return [name for *_, name in sorted(found)]

    def _leave(self, name: str, reason: str) -> None:
        """Let servers send it no more requests, then let it end."""
        logger.info("Unloading the model %s: %s", name, reason)
        model = self._models[name]
        self._set(model, "unloading")
        self._publish()
        if model.engine.child.pid is None:
            model.engine.rest()
            self._left(name)
        else:
            model.engine.leave()

    def _left(self, name: str) -> None:
        logger.info("Unloaded the model %s", name)
        model = self._models[name]
        self._set(model, "unloaded")
        model.state = replace(model.state, num_unloaded=model.state.num_unloaded + 1)

    def _fail(self, name: str, message: str) -> None:
        logger.error("The model %s cannot be loaded: %s", name, message)
        model = self._models[name]
        self._set(model, "failed", message)
        num_failures = model.state.num_failures + 1
        model.state = replace(model.state, num_failures=num_failures, retry_time=time.monotonic() + RETRY_S)

    def _set(self, model: _Model, state: fleet.State, message: str = "") -> None:
        model.state = replace(model.state, state=state, message=message)

    @property
    def _state(self) -> fleet.FleetState:
        models = {name: model.state for name, model in self._models.items()}
        return fleet.FleetState(models, dict(self._aliases), dict(self._adapters))

    def _publish(self) -> None:
        state = self._state
        if state != self._published:
            with contextlib.suppress(OSError):  # the folder is full, or gone: the next look tries again
                fleet.publish(self._runtime_dir, state)
                self._published = state
