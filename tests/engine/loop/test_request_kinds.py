"""What a request brings and what it gains are unions: other kinds go the whole way, from the client and back."""

import asyncio
import pathlib
import time
from typing import Any, ClassVar

import msgspec
import pytest

from tests.engine.fake_runner import make_engine
from weft.engine.loop.engine import Engine
from weft.engine.loop.pending import RejectedError
from weft.engine.loop.server_link import ServerLink
from weft.engine.wire import messages
from weft.engine.wire.inputs import TokensInput, TokenSpan
from weft.engine.wire.messages import (
    SOCKET_NAME,
    STATUS_NAME,
    Accepted,
    AddRequest,
    EngineInfo,
    FinishReason,
    Rejected,
    StepOutput,
    TokensOutput,
)
from weft.engine.wire.params import SamplingParams
from weft.engine.wire.pictures import Picture
from weft.engine.wire.status_page import Status, StatusPage
from weft.server.errors import InvalidRequestError
from weft.server.models.engine_client import Generation, SocketEngineClient

INFO = EngineInfo("epoch", "Fake", 50, 100, (), "cpu", "float32", "none", 4, 32, 8, 64)
PARAMS = SamplingParams(max_tokens=3)


class RepeatedInput(msgspec.Struct, tag="repeated", frozen=True):
    """One id, so many times: a prompt that is not written out."""

    token_id: int
    times: int
    token_types: list[int] = []
    spans: list[TokenSpan] = []
    pictures: list[Picture] = []

    @property
    def token_ids(self) -> list[int]:
        return [self.token_id] * self.times

    input_length: ClassVar[int] = 0
    samples: ClassVar[bytes] = b""

    def num_slots(self, block_size: int) -> int:
        return 0

    def slots(self, block_size: int) -> list[int]:
        return self.token_ids

    def fault(self, vocab_size: int, limits: object) -> str | None:
        return None if self.times > 0 else f"times must be at least 1, got {self.times}"


class VectorOutput(msgspec.Struct, array_like=True, tag=1):
    """Numbers instead of tokens; what is unread of them adds up."""

    request_id: int
    index: int
    values: list[float]
    finish_reason: FinishReason | None = None

    def merge(self, later: "VectorOutput") -> None:
        self.values = [a + b for a, b in zip(self.values, later.values, strict=True)]
        self.finish_reason = later.finish_reason


class WideAdd(AddRequest, frozen=True, tag="add"):
    input: TokensInput | RepeatedInput  # type: ignore[assignment]


class WideStep(StepOutput, tag="step"):
    outputs: list[TokensOutput | VectorOutput]  # type: ignore[assignment]


@pytest.fixture(autouse=True)
def wider_unions(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that another kind takes beside its struct: its name in the union, of which the decoders are made."""
    to_engine: Any = msgspec.msgpack.Decoder(WideAdd)
    from_engine: Any = msgspec.msgpack.Decoder(EngineInfo | Accepted | Rejected | WideStep)
    monkeypatch.setattr(messages, "decode_to_engine", to_engine.decode)
    monkeypatch.setattr(messages, "decode_from_engine", from_engine.decode)


class Serving:
    """A real link and a real engine over a fake model, driven from the event loop of the client under test."""

    def __init__(self, runtime_dir: pathlib.Path, engine: Engine[Any]) -> None:
        StatusPage(runtime_dir / STATUS_NAME).write(Status(is_ready=1, progress_time=time.monotonic()))
        self.link = ServerLink(runtime_dir / SOCKET_NAME, INFO)
        self.engine = engine
        self.is_stepping = True
        self.numbers: list[int] = []
        self._task = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        while True:
            for connection, message in self.link.poll(0):
                if isinstance(message, AddRequest):
                    self._add(connection, message)
            if self.engine.has_work and self.is_stepping:
                self.link.put_outputs(self.engine.step())
            await asyncio.sleep(0.001)

    def _add(self, connection: int, add: AddRequest) -> None:
        self.numbers.append(add.request_id)
        try:
            self.engine.add(connection, add)
            self.link.put(connection, Accepted(add.request_id))
        except RejectedError as error:
            self.link.put(connection, Rejected(add.request_id, error.reason, str(error)))

    def stop(self) -> None:
        self._task.cancel()
        for connection in list(self.link._connections.values()):
            self.link._close(connection)
        self.link._listener.close()
        self.link._selector.close()


async def asked(client: SocketEngineClient, wanted: object) -> Generation:
    while client.info is None:
        await asyncio.sleep(0.005)
    request: Any = wanted
    return await client.generate(request)


async def token_ids(generation: Generation) -> list[int]:
    return [i async for output in generation for i in output.token_ids]


def test_another_input_runs_and_is_checked_by_its_own_type(tmp_path: pathlib.Path) -> None:
    async def main() -> None:
        serving = Serving(tmp_path, make_engine().engine)
        async with SocketEngineClient(tmp_path) as client:
            plain = await token_ids(await asked(client, AddRequest(TokensInput([7] * 5), PARAMS)))
            repeated = await token_ids(await asked(client, WideAdd(RepeatedInput(7, 5), PARAMS)))
            assert repeated == plain and len(plain) == 3
            with pytest.raises(InvalidRequestError, match="times must be at least 1, got 0"):
                await asked(client, WideAdd(RepeatedInput(7, 0), PARAMS))
            assert len(set(serving.numbers)) == 3
        serving.stop()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_another_output_is_merged_on_both_sides_and_read(tmp_path: pathlib.Path) -> None:
    async def main() -> None:
        serving = Serving(tmp_path, make_engine().engine)
        async with SocketEngineClient(tmp_path) as client:
            serving.is_stepping = False  # what is gained here does not come from its steps
            generation = await asked(client, AddRequest(TokensInput([7]), PARAMS, num_choices=2))
            number = serving.numbers[0]

            def put(index: int, *values: float, reason: FinishReason | None = None) -> None:
                times = 2 if reason is None else 1
                outputs: Any = [(0, VectorOutput(number, index, list(values), reason)) for _ in range(times)]
                serving.link.put_outputs(outputs)

            put(1, 0.5, 1.0)  # twice: merged before they are sent
            put(0, 0.25, 0.0, reason=FinishReason.STOP)
            put(1, 1.0, 1.0, reason=FinishReason.LENGTH)  # merged in the mailbox, unless it was read in between
            gained: dict[int, list[VectorOutput]] = {0: [], 1: []}
            async for output in generation:
                vector: Any = output
                assert isinstance(vector, VectorOutput)
                gained[vector.index].append(vector)
            assert [sum(v.values[0] for v in gained[index]) for index in (0, 1)] == [0.25, 2.0]
            serving.stop()
            assert [gained[index][-1].finish_reason for index in (0, 1)] == [FinishReason.STOP, FinishReason.LENGTH]

    asyncio.run(asyncio.wait_for(main(), 60))
