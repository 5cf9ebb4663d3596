"""What a server process does for a model that may be not loaded; the supervisor's part is played by the tests."""

import asyncio
import os
import pathlib
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from weft.engine.wire.inputs import TokensInput
from weft.engine.wire.messages import AddRequest, SamplingParams
from weft.engine.wire.options import Adapter
from weft.server.errors import EngineLeftError, EngineUnavailableError, ModelFailedError, ModelLoadingError
from weft.server.models import fleet as fleet_module
from weft.server.models.fleet import ASKS_NAME, Ask, Fleet, FleetState, ModelState, first_state, publish, take_asks
from weft.server.models.other_clients import OnDemandClient
from weft.server.models.served_model import LiveModels
from weft.server.settings import Settings, StartError

SETTINGS = Settings.model_validate({"models": {"a": {"aliases": ["x"]}, "b": {"load": "on-demand"}}})
REQUEST = AddRequest(TokensInput([1]), SamplingParams(max_tokens=1))
READY = ModelState("ready")


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    (tmp_path / ASKS_NAME).mkdir()
    monkeypatch.setattr(os, "kill", lambda *_: None)
    return tmp_path


def told(folder: pathlib.Path, state: ModelState, **aliases: str) -> None:
    publish(folder, FleetState({"a": READY, "b": state}, aliases))


class SocketClient:
    """An engine that is connected from the first `connect` on, and takes no request before the second is sent."""

    def __init__(self) -> None:
        self.info: Any = None
        self.num_sent = self.num_refused = 0
        self.has_left = False

    def connect(self) -> None:
        self.info = "info"

    async def generate(self, request: AddRequest) -> Any:
        self.num_sent += 1
        if self.num_sent <= self.num_refused:
            raise EngineUnavailableError
        return "generation"


def client(folder: pathlib.Path, engine: SocketClient, timeout_s: float = 60.0) -> OnDemandClient:
    return OnDemandClient("b", engine, Fleet(folder, SETTINGS), timeout_s)  # type: ignore[arg-type]


async def asked(folder: pathlib.Path) -> list[Ask]:
    while not (asks := list(take_asks(folder))):
        await asyncio.sleep(0.01)
    return asks


def test_state_is_read_again_when_it_was_replaced_and_equal_asks_are_one(folder: pathlib.Path) -> None:
    fleet = Fleet(folder, SETTINGS)
    assert fleet.read() == first_state(SETTINGS)
    assert fleet.read().models["b"].state == "unloaded"
    told(folder, READY, x="b")
    assert (fleet.read().models["b"], fleet.read().aliases) == (READY, {"x": "b"})
    for _ in range(3):
        fleet.ask(Ask("load", "b"))
    assert list(take_asks(folder)) == [Ask("load", "b")]
    assert list(take_asks(folder)) == []
    Fleet(folder / "gone", SETTINGS).ask(Ask("load", "b"))  # nobody can obey, and nobody fails


def test_what_the_supervisor_has_said_is_not_found_out_again(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every server process would read all files of adapters."""
    told(folder, READY)
    monkeypatch.setattr(fleet_module, "first_state", None)
    assert Fleet(folder, SETTINGS).read().models["b"] == READY


def test_names_follow_the_aliases(folder: pathlib.Path) -> None:
    a, b = SimpleNamespace(name="a"), SimpleNamespace(name="b")
    models = LiveModels({"a": a, "b": b}, Fleet(folder, SETTINGS))  # type: ignore[dict-item]
    assert (list(models), models["x"], len(models)) == (["a", "x", "b"], a, 3)
    told(folder, READY, x="b", y="b")
    assert (list(models), models["x"], len(models)) == (["a", "b", "x", "y"], b, 4)
    assert "z" not in models


def test_a_request_waits_until_the_model_is_loaded_and_is_sent_again_until_it_is_accepted(folder: pathlib.Path) -> None:
    """The engine may leave between the look at its state and the request."""
    engine = SocketClient()
    engine.num_refused = 2

    async def main() -> None:
        waiting = asyncio.create_task(client(folder, engine).generate(REQUEST))
        assert await asked(folder) == [Ask("load", "b")]
        told(folder, ModelState("loading"))
        await asyncio.sleep(0.1)
        assert engine.info is None and not waiting.done()
        told(folder, READY)
        assert await waiting == "generation"  # type: ignore[comparison-overlap]

    asyncio.run(main())
    assert engine.num_sent == 3


def test_what_the_engine_said_of_itself_outlasts_it(folder: pathlib.Path) -> None:
    """A request that is prepared while the model leaves needs its limits."""
    engine = SocketClient()
    on_demand = client(folder, engine)
    told(folder, READY)
    asyncio.run(on_demand.load())
    assert on_demand.info == "info"
    engine.info = None
    assert on_demand.info == "info"


def test_a_failure_is_told_and_later_requests_do_not_try_at_once(folder: pathlib.Path) -> None:
    async def main() -> None:
        on_demand = client(folder, SocketClient())
        waiting = asyncio.create_task(on_demand.load())
        await asked(folder)
        told(folder, ModelState("failed", "no weights", num_failures=1, retry_time=1e12))
        with pytest.raises(ModelFailedError, match="the model b cannot be loaded: no weights"):
            await waiting
        with pytest.raises(ModelFailedError):
            await on_demand.load()
        assert list(take_asks(folder)) == []

    asyncio.run(main())


def test_a_model_that_is_not_there_in_time_is_said_to_be_loading(folder: pathlib.Path) -> None:
    with pytest.raises(ModelLoadingError, match=r"the model b is not loaded within 0.1 s"):
        asyncio.run(client(folder, SocketClient(), timeout_s=0.1).load())


def test_a_request_that_waits_is_told_that_the_server_cuts_it(folder: pathlib.Path) -> None:
    engine = SocketClient()

    async def main() -> None:
        waiting = asyncio.create_task(client(folder, engine, timeout_s=10.0).load())
        await asked(folder)
        engine.has_left = True
        with pytest.raises(EngineLeftError):
            await waiting

    asyncio.run(main())


@pytest.mark.parametrize("num_hung", [1, 3])
def test_the_start_does_not_wait_for_ever_for_adapters(
    num_hung: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk that hung kept the start from going on, or from ending, and nothing was said."""
    settings = Settings(
        served_model_name=("m",), lora={"good": "/good", **{f"bad{i}": f"/hung/{i}" for i in range(num_hung)}}
    )
    answers = threading.Event()

    def find(name: str, folder: pathlib.Path) -> Adapter:
        assert str(folder) == "/good" or answers.wait(30)
        return Adapter(name, str(folder), "c")

    monkeypatch.setattr(fleet_module, "find_adapter", find)
    monkeypatch.setattr(fleet_module, "ADAPTER_S", 0.2)
    monkeypatch.setattr(fleet_module, "_TELL_S", 0.1)
    with pytest.raises(StartError, match=r"lora: bad0: the files in /hung/0 are not read within 0\.2 s"):
        first_state(settings)
    assert "/hung/0" in caplog.text and "/good" not in caplog.text
    answers.set()
    assert len(first_state(settings).adapters) == num_hung + 1
