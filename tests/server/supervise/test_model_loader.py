"""What the supervisor decides, with engines that are only pages and notes."""

import pathlib
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from weft.engine.wire.options import Adapter
from weft.engine.wire.status_page import Status
from weft.server.model_entry import MAX_MODELS
from weft.server.models.fleet import ASKS_NAME, Ask, Fleet
from weft.server.settings import Settings
from weft.server.supervise import model_loader
from weft.server.supervise.memory_shares import EvictionPlan, MemoryNeed
from weft.server.supervise.model_loader import ModelLoader

SETTINGS = Settings.model_validate(
    {
        "models": {
            "base": {"aliases": ["chat"]},
            "a": {"load": "on-demand"},
            "b": {"load": "on-demand", "unload_after": 60},
            "c": {"load": "on-demand"},
            "d": {"load": "on-demand"},
        }
    }
)
NEEDS = {"base": 50, "a": 20, "b": 30, "c": 40}


class Engine:
    """An engine that is told to start, leave or rest."""

    def __init__(self) -> None:
        self.status = Status()
        self.signals: list[int] = []
        self.child = SimpleNamespace(due_time=0.0, pid=None, num_deaths=0, send_signal=self.signals.append)
        self.has_left = False
        self.fault = ""

    def leave(self) -> None:
        self.has_left = True

    def rest(self) -> None:
        self.child.due_time, self.child.pid, self.status = None, None, Status()

    def take_fault(self) -> str:
        return self.fault


class Site:
    """A loader, its engines, a clock, and a server process that asks."""

    def __init__(self, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (folder / ASKS_NAME).mkdir()
        self.now = 1000.0
        clock = SimpleNamespace(monotonic=lambda: self.now, time=lambda: 5.0)
        monkeypatch.setattr(model_loader, "time", clock)
        self.signals: list[Any] = []
        monkeypatch.setattr("os.kill", lambda *told: self.signals.append(told))
        self.fleet = Fleet(folder, SETTINGS)
        self.engines = {name: Engine() for name in SETTINGS.fleet}
        room = EvictionPlan({"cpu": 100}, {name: MemoryNeed("cpu", size) for name, size in NEEDS.items()})
        self.loader = ModelLoader(SETTINGS, folder, self.engines, room, {"d": "no such layer"})  # type: ignore[arg-type]
        self.run("base")

    def ask(self, kind: Any, model: str, alias: str = "") -> None:
        self.fleet.ask(Ask(kind, model, alias))
        self.loader.look()

    def run(self, name: str, **status: int) -> None:
        """The engine is started and reports."""
        engine = self.engines[name]
        assert engine.child.due_time == 0.0
        engine.child.pid, engine.has_left = 1, False
        self.report(name, **status)

    def report(self, name: str, **status: int) -> None:
        self.engines[name].status = Status(epoch_id=1, is_ready=1, **status)
        self.loader.look()

    def end(self, name: str, code: int = 0) -> bool:
        child = self.engines[name].child
        child.pid, self.engines[name].status = None, Status(epoch_id=1)  # as `EngineProcess.note_end` leaves it
        is_done = self.loader.note_end(child, code)
        self.loader.look()
        return is_done

    def load(self, name: str) -> None:
        """Load it, and let it do something."""
        self.ask("load", name)
        self.run(name)
        self.report(name, num_steps=1)

    @property
    def states(self) -> str:
        """Of all but d, which is not planned."""
        return " ".join(state.state for name, state in self.fleet.read().models.items() if name != "d")


@pytest.fixture
def site(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(tmp_path, monkeypatch)


def test_names_of_adapters_come_and_go_as_asked(site: Site) -> None:
    one, other = Adapter("lora", "/one", "1"), Adapter("lora", "/other", "2")

    def ask(kind: Any, model: str, adapter: Adapter, *, replaces: bool = False) -> str | None:
        site.fleet.ask(Ask(kind, model, adapter=adapter, replaces=replaces))
        site.loader.look()
        served = site.fleet.read().adapters.get("lora")
        return None if served is None else f"{served.model}{served.adapter.folder}"

    assert ask("add adapter", "base", one) == "base/one"
    assert ask("add adapter", "base", other) == "base/one", "it is in use"
    assert ask("add adapter", "a", other, replaces=True) == "base/one", "it is of another model"
    assert ask("drop adapter", "base", other) == "base/one", "it is another one"
    assert ask("add adapter", "base", other, replaces=True) == "base/other"
    site.ask("alias", "a", "lora")
    assert "lora" not in site.fleet.read().aliases
    assert ask("drop adapter", "base", other) is None
    for name in ("base", *site.fleet.read().aliases):
        assert ask("add adapter", "base", Adapter(name, "/one", "1")) is None
        assert name not in site.fleet.read().adapters


def test_a_model_is_started_when_it_is_asked_for(site: Site) -> None:
    assert site.states == "ready unloaded unloaded unloaded"
    assert site.loader.wait_s() is None
    assert site.engines["a"].child.due_time is None
    site.ask("load", "a")
    assert len(site.signals) == 1
    assert site.states == "ready loading unloaded unloaded"
    site.run("a")
    assert site.states == "ready ready unloaded unloaded"
    assert site.loader.are_ready
    assert site.fleet.read().models["a"].memory_bytes == 20


def test_the_least_recently_used_leave_as_many_as_must(site: Site) -> None:
    site.load("b")
    site.now += 1
    site.load("a")
    site.now += 1
    site.report("b", num_steps=2)  # so it is a that was used longer ago
    site.ask("load", "c")  # 100 - 50 - 20 - 30 = 0 of 40 are free
    assert site.states == "ready unloading unloading unloaded"
    assert site.engines["a"].has_left and site.engines["b"].has_left
    assert not site.engines["base"].has_left
    assert site.end("a")
    assert site.states == "ready unloaded unloading unloaded", "it waits for both"
    assert site.end("b")
    assert site.states == "ready unloaded unloaded loading"


def test_one_that_is_idle_leaves_before_one_that_works(site: Site) -> None:
    site.load("a")
    site.load("b")
    site.report("a", num_steps=2, has_work=1)
    site.now += 1
    site.report("b", num_steps=3)
    site.now += 1
    site.ask("unload", "b")
    site.end("b")
    site.load("b")
    site.ask("load", "c")
    assert site.states.startswith("ready unloading unloading"), "40 need both"
    site.end("b", -signal.SIGKILL)
    site.end("a")
    site.run("c")
    site.ask("load", "b")
    assert site.states == "ready unloaded unloaded ready", "c has not served anybody yet"
    site.report("c", num_steps=1)
    assert site.states == "ready unloaded unloaded unloading"


def test_what_nobody_waits_for_any_more_is_not_loaded(site: Site) -> None:
    site.load("c")
    site.ask("load", "b")
    assert site.states == "ready unloaded unloaded unloading"
    site.now += 10
    site.loader.look()
    site.end("c")
    assert site.states == "ready unloaded unloaded unloaded"


def test_one_that_others_wait_for_is_loaded_again_and_its_unloading_is_counted(site: Site) -> None:
    site.load("a")
    site.ask("unload", "a")
    site.ask("load", "a")
    site.end("a")
    state = site.fleet.read().models["a"]
    assert (state.state, state.num_unloaded) == ("loading", 1), "nobody sees it unloaded"


def test_an_idle_model_leaves_after_a_time(site: Site) -> None:
    site.load("b")
    site.now += 50
    site.report("b", num_steps=2)
    site.now += 59
    site.loader.look()
    assert site.states == "ready unloaded ready unloaded"
    site.now += 1
    site.loader.look()
    assert site.states == "ready unloaded unloading unloaded"
    assert site.fleet.read().models["b"].last_used == 5.0


def test_one_that_cannot_be_loaded_has_failed_and_may_be_tried_again(site: Site) -> None:
    site.ask("load", "a")
    site.engines["a"].fault = "no weights"
    assert site.end("a", 2)
    state = site.fleet.read().models["a"]
    assert (state.state, state.message, state.num_failures) == ("failed", "no weights", 1)
    assert state.retry_time > site.now
    site.engines["a"].fault = ""
    site.load("a")
    assert site.states == "ready ready unloaded unloaded"
    site.engines["a"].child.num_deaths = 1
    assert not site.end("a", -11), "one that crashed is restarted"
    site.engines["a"].child.num_deaths = 3
    assert site.end("a", -11)
    assert site.fleet.read().models["a"].message == "its engine ended 3 times before it was ready"


def test_an_engine_that_hangs_while_it_loads_is_killed_and_its_model_has_failed(site: Site) -> None:
    site.ask("load", "a")
    engine = site.engines["a"]
    engine.child.pid = 1
    for loaded_bytes in (1, 2):
        engine.status = Status(epoch_id=1, loaded_bytes=loaded_bytes)
        site.loader.look()
        site.now += 899
        site.loader.look()
        assert not engine.signals
    site.now += 1
    site.loader.look()
    assert engine.signals == [signal.SIGKILL]
    assert site.end("a", -signal.SIGKILL)
    state = site.fleet.read().models["a"]
    assert (state.state, state.message) == ("failed", "its engine showed no progress for 900 s")
    site.load("a")
    assert site.states == "ready ready unloaded unloaded"


def test_small_models_do_not_overtake_one_that_needs_more_room(site: Site) -> None:
    site.load("b")
    site.ask("load", "a")
    site.run("a")  # 50 + 30 + 20, and it has not served anybody yet
    site.ask("unload", "b")
    site.end("b")
    site.ask("load", "c")
    site.ask("load", "b")
    assert site.states == "ready ready unloaded unloaded", "the room of b is kept for c"
    site.report("a", num_steps=1)
    site.end("a")
    assert site.states == "ready unloaded unloaded loading"


def test_one_that_was_not_planned_is_not_started(site: Site) -> None:
    site.ask("load", "d")
    state = site.fleet.read().models["d"]
    assert (state.state, state.message, state.num_failures) == ("failed", "no such layer", 1)
    assert site.engines["d"].child.due_time is None


def test_a_model_that_is_always_loaded_stays(site: Site) -> None:
    site.ask("unload", "base")
    assert not site.engines["base"].has_left
    assert not site.end("base", 2)
    assert site.states.startswith("loading")


def test_an_alias_is_switched_but_takes_no_models_name(site: Site) -> None:
    site.ask("alias", "a", "chat")
    site.ask("alias", "a", "new")
    site.ask("alias", "a", "b")
    site.ask("alias", "none", "chat")
    assert site.fleet.read().aliases == {"chat": "a", "new": "a"}
    for number in range(MAX_MODELS):  # asked before the next look
        site.fleet.ask(Ask("alias", "a", f"new{number}"))
    site.loader.look()
    assert len(site.fleet.read().aliases) == MAX_MODELS
