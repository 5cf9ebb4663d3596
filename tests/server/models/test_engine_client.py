"""The client against a scripted engine on a real Unix socket, on the event loop that server processes use."""

import asyncio
import pathlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import uvloop

from weft.engine.wire.inputs import TokensInput
from weft.engine.wire.messages import (
    SOCKET_NAME,
    STATUS_NAME,
    AbortRequest,
    Accepted,
    AddRequest,
    EngineInfo,
    FinishReason,
    FrameReader,
    Rejected,
    RejectReason,
    RequestOutput,
    StepOutput,
    ToEngine,
    TokensOutput,
    decode_to_engine,
    encode,
)
from weft.engine.wire.params import SamplingParams
from weft.engine.wire.status_page import Status, StatusPage
from weft.server.errors import EngineDiedError, EngineLeftError, EngineUnavailableError, PoisonRequestError
from weft.server.models import engine_client
from weft.server.models.engine_client import Generation, SocketEngineClient

GREEDY = SamplingParams(temperature=0.0)
TIMEOUT_S = 60.0
"""Of what is waited for; only a failure takes so long."""


def info(epoch: str) -> EngineInfo:
    return EngineInfo(
        epoch=epoch,
        architecture="Qwen3ForCausalLM",
        vocab_size=256,
        max_model_len=128,
        eos_token_ids=(0,),
        device="cpu",
        dtype="float32",
        attention_backend="sdpa",
        block_size=16,
        num_blocks=8,
        max_num_seqs=4,
        max_num_batched_tokens=64,
    )


class FakeEngine:
    """Says only what the test tells it to say, and hands over what it hears."""

    def __init__(self, runtime_dir: pathlib.Path, epoch: str) -> None:
        self._path = runtime_dir / SOCKET_NAME
        self._info = info(epoch)
        self._heard: asyncio.Queue[ToEngine] = asyncio.Queue()
        self._writer: asyncio.StreamWriter | None = None

    async def start(self) -> None:
        self._path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, self._path)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.say(self._info)
        frames = FrameReader()
        while data := await reader.read(65536):
            for body in frames.feed(data):
                self._heard.put_nowait(decode_to_engine(body))
        writer.close()

    def say(self, *messages: object) -> None:
        assert self._writer is not None
        for message in messages:
            self._writer.write(encode(message))  # type: ignore[arg-type]

    def say_bytes(self, data: bytes) -> None:
        assert self._writer is not None
        self._writer.write(data)

    async def hear(self) -> ToEngine:
        return await asyncio.wait_for(self._heard.get(), TIMEOUT_S)

    async def hear_add(self) -> AddRequest:
        message = await self.hear()
        assert isinstance(message, AddRequest)
        return message

    @property
    def has_heard_all(self) -> bool:
        return self._heard.empty()

    async def die(self) -> None:
        self._server.close()
        if self._writer is not None:
            self._writer.transport.abort()


def step(*outputs: RequestOutput) -> StepOutput:
    return StepOutput(list(outputs))


async def connected(client: SocketEngineClient, epoch: str) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while client.info is None or client.info.epoch != epoch:
            await asyncio.sleep(0.005)


async def disconnected(client: SocketEngineClient) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while client.info is not None:
            await asyncio.sleep(0.005)


async def accepted(client: SocketEngineClient, engine: FakeEngine, num_choices: int = 1) -> tuple[Generation, int]:
    task = asyncio.create_task(client.generate(AddRequest(TokensInput([1, 2]), GREEDY, num_choices)))
    request = await engine.hear_add()
    engine.say(Accepted(request.request_id))
    return await asyncio.wait_for(task, TIMEOUT_S), request.request_id


def run(tmp_path: pathlib.Path, script: Callable[[SocketEngineClient, FakeEngine], Awaitable[None]]) -> None:
    async def main() -> None:
        engine = FakeEngine(tmp_path, "a")
        await engine.start()
        try:
            async with SocketEngineClient(tmp_path) as client:
                await connected(client, "a")
                await script(client, engine)
        finally:
            await engine.die()

    uvloop.run(main())


async def settle() -> None:
    """Let what is under way on the socket arrive: both ends are on this loop, so its turns count, and not the time."""
    for _ in range(50):
        await asyncio.sleep(0)


async def read_all(generation: Generation) -> AsyncIterator[RequestOutput]:
    async with asyncio.timeout(TIMEOUT_S):
        async for output in generation:
            yield output


def test_accepted_request_streams_to_its_end(tmp_path: pathlib.Path) -> None:
    async def script(client: SocketEngineClient, engine: FakeEngine) -> None:
        task = asyncio.create_task(client.generate(AddRequest(TokensInput([5, 6]), GREEDY, 2, "t", 3, 9.5, "s")))
        request = await engine.hear_add()
        assert (request.input.token_ids, request.num_choices, request.sampling_params) == ([5, 6], 2, GREEDY)
        assert (request.tenant, request.priority, request.deadline, request.cache_salt) == ("t", 3, 9.5, "s")
        await settle()
        assert not task.done()  # nothing is promised before the engine has answered
        engine.say(Accepted(request.request_id))
        generation = await task
        number = request.request_id
        engine.say(step(TokensOutput(number, 0, [7]), TokensOutput(number, 1, [8], FinishReason.LENGTH)))
        engine.say(step(TokensOutput(number, 0, [0], FinishReason.STOP, stop_token_id=0)))
        outputs = [output async for output in read_all(generation)]
        ids = {index: [i for o in outputs if o.index == index for i in o.token_ids] for index in (0, 1)}
        assert ids == {0: [7, 0], 1: [8]}
        assert {o.index: o.finish_reason for o in outputs if o.finish_reason is not None} == {
            0: FinishReason.STOP,
            1: FinishReason.LENGTH,
        }
        generation.close()
        await settle()
        assert engine.has_heard_all  # what has finished needs no abort

    run(tmp_path, script)


def test_what_cannot_be_written_leaves_nothing_behind(tmp_path: pathlib.Path) -> None:
    """A number beyond 64 bits was noticed behind the registration: an idle engine seemed to owe an answer for ever."""

    async def script(client: SocketEngineClient, engine: FakeEngine) -> None:
        StatusPage(tmp_path / STATUS_NAME).write(Status(epoch_id=1, is_ready=1))
        with pytest.raises(OverflowError):
            await client.generate(AddRequest(TokensInput([5]), GREEDY, priority=10**20))
        await settle()
        assert not client.status().has_work
        assert engine.has_heard_all

    run(tmp_path, script)


def test_a_process_that_has_not_met_a_ready_engine_waits_for_it(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine says on its page that it is ready before each server process has connected."""
    monkeypatch.setattr(engine_client, "MEET_S", 10 * TIMEOUT_S)  # as if it never gave up

    async def main() -> None:
        page, engine = StatusPage(tmp_path / STATUS_NAME), FakeEngine(tmp_path, "a")
        async with SocketEngineClient(tmp_path) as client:
            await asyncio.wait_for(client.meet(), TIMEOUT_S)  # it loads, or nobody is there: the caller is told at once
            page.write(Status(epoch_id=1, is_ready=1))
            meeting = asyncio.create_task(client.meet())
            await settle()
            assert not meeting.done()
            await engine.start()
            await asyncio.wait_for(meeting, TIMEOUT_S)
            assert client.info is not None
            await engine.die()
            await disconnected(client)
            await asyncio.wait_for(client.meet(), TIMEOUT_S)  # lost, not about to come: the caller is told at once

    uvloop.run(main())


def test_requests_on_one_connection_do_not_mix(tmp_path: pathlib.Path) -> None:
    async def script(client: SocketEngineClient, engine: FakeEngine) -> None:
        first, one = await accepted(client, engine)
        second, two = await accepted(client, engine)
        assert one != two
        engine.say(
            step(TokensOutput(two, 0, [2], FinishReason.STOP), TokensOutput(one, 0, [1], FinishReason.STOP)),
        )
        assert [o.token_ids async for o in read_all(first)] == [[1]]
        assert [o.token_ids async for o in read_all(second)] == [[2]]

    run(tmp_path, script)


def test_rejection_carries_reason_and_message(tmp_path: pathlib.Path) -> None:
    async def script(client: SocketEngineClient, engine: FakeEngine) -> None:
        task = asyncio.create_task(client.generate(AddRequest(TokensInput([1]), GREEDY)))
        request = await engine.hear_add()
        engine.say(Rejected(request.request_id, RejectReason.POISON, "it killed the engine"))
        with pytest.raises(PoisonRequestError, match="it killed the engine"):
            await task

    run(tmp_path, script)


def test_slow_reader_gets_one_merged_output_per_choice(tmp_path: pathlib.Path) -> None:
    async def script(client: SocketEngineClient, engine: FakeEngine) -> None:
        generation, number = await accepted(client, engine, num_choices=2)
        for token_id in range(100):
            engine.say(step(TokensOutput(number, 1, [token_id]), TokensOutput(number, 0, [token_id + 100])))
        engine.say(step(*(TokensOutput(number, i, [], FinishReason.LENGTH) for i in (0, 1))))
        await settle()
        outputs = [output async for output in read_all(generation)]
        assert [o.index for o in outputs] == [1, 0]  # the one that waited longer comes first
        assert outputs[0].token_ids == list(range(100))
        assert outputs[1].token_ids == list(range(100, 200))
        assert [o.finish_reason for o in outputs] == [FinishReason.LENGTH] * 2

    run(tmp_path, script)


def test_abort_of_one_choice_leaves_the_others(tmp_path: pathlib.Path) -> None:
    async def script(client: SocketEngineClient, engine: FakeEngine) -> None:
        generation, number = await accepted(client, engine, num_choices=2)
        engine.say(step(TokensOutput(number, 0, [1]), TokensOutput(number, 1, [2])))
        await settle()
        generation.abort(0)
        generation.abort(0)  # a second one says nothing
        assert await engine.hear() == AbortRequest(number, 0)
        engine.say(step(TokensOutput(number, 0, [3]), TokensOutput(number, 1, [4], FinishReason.STOP)))
        outputs = [output async for output in read_all(generation)]
        assert {o.index for o in outputs} == {1}
        assert [i for o in outputs for i in o.token_ids] == [2, 4]
        assert engine.has_heard_all

    run(tmp_path, script)


def test_abort_of_the_last_choice_ends_a_waiting_reader(tmp_path: pathlib.Path) -> None:
    async def script(client: SocketEngineClient, engine: FakeEngine) -> None:
        generation, number = await accepted(client, engine)

        async def read() -> list[RequestOutput]:
            return [output async for output in generation]

        reader = asyncio.create_task(read())
        await settle()
        generation.abort(0)
        assert await asyncio.wait_for(reader, TIMEOUT_S) == []
        assert await engine.hear() == AbortRequest(number, None)

    run(tmp_path, script)


def test_close_aborts_once(tmp_path: pathlib.Path) -> None:
    async def script(client: SocketEngineClient, engine: FakeEngine) -> None:
        generation, number = await accepted(client, engine, num_choices=3)
        generation.close()
        generation.close()
        assert await engine.hear() == AbortRequest(number, None)
        await settle()
        assert engine.has_heard_all
        assert [output async for output in read_all(generation)] == []

    run(tmp_path, script)


def test_cancelled_while_waiting_for_the_answer_aborts(tmp_path: pathlib.Path) -> None:
    async def script(client: SocketEngineClient, engine: FakeEngine) -> None:
        task = asyncio.create_task(client.generate(AddRequest(TokensInput([1]), GREEDY)))
        request = await engine.hear_add()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await engine.hear() == AbortRequest(request.request_id, None)
        engine.say(Accepted(request.request_id))  # crossed the abort on its way: nobody minds
        generation, number = await accepted(client, engine)
        engine.say(step(TokensOutput(number, 0, [1], FinishReason.STOP)))
        assert len([output async for output in read_all(generation)]) == 1

    run(tmp_path, script)


def test_no_engine_is_said_at_once(tmp_path: pathlib.Path) -> None:
    async def main() -> None:
        async with SocketEngineClient(tmp_path) as client:
            assert client.info is None
            with pytest.raises(EngineUnavailableError):
                await asyncio.wait_for(client.generate(AddRequest(TokensInput([1]), GREEDY)), TIMEOUT_S)

    uvloop.run(main())


def test_an_engine_that_hangs_is_asked_nothing(tmp_path: pathlib.Path) -> None:
    """New requests hung with it."""

    async def script(client: SocketEngineClient, engine: FakeEngine) -> None:
        page = StatusPage(tmp_path / STATUS_NAME)
        page.write(Status(is_ready=1, stall_time=time.monotonic() - 1))
        with pytest.raises(EngineUnavailableError):
            await client.generate(AddRequest(TokensInput([1]), GREEDY))
        page.write(Status(is_ready=1, stall_time=time.monotonic() + 500))
        await accepted(client, engine)

    run(tmp_path, script)


def test_death_mid_stream_hands_out_what_came_then_raises(tmp_path: pathlib.Path) -> None:
    async def script(client: SocketEngineClient, engine: FakeEngine) -> None:
        generation, number = await accepted(client, engine)
        task = asyncio.create_task(client.generate(AddRequest(TokensInput([1]), GREEDY)))
        await engine.hear_add()
        engine.say(step(TokensOutput(number, 0, [1])))
        await settle()
        await engine.die()
        with pytest.raises(EngineUnavailableError):  # not accepted yet: it may be sent again
            await asyncio.wait_for(task, TIMEOUT_S)
        received = []
        with pytest.raises(EngineDiedError):
            async for output in read_all(generation):
                received.append(output.token_ids)
        assert received == [[1]]
        generation.close()
        assert client.info is None

    run(tmp_path, script)


def test_finished_but_unread_survives_death(tmp_path: pathlib.Path) -> None:
    async def script(client: SocketEngineClient, engine: FakeEngine) -> None:
        generation, number = await accepted(client, engine)
        engine.say(step(TokensOutput(number, 0, [1], FinishReason.STOP)))
        await settle()
        await engine.die()
        await disconnected(client)
        assert [o.token_ids async for o in read_all(generation)] == [[1]]

    run(tmp_path, script)


def test_reconnects_to_the_next_engine(tmp_path: pathlib.Path) -> None:
    async def script(client: SocketEngineClient, engine: FakeEngine) -> None:
        await engine.die()
        await disconnected(client)
        with pytest.raises(EngineUnavailableError):
            await client.generate(AddRequest(TokensInput([1]), GREEDY))
        successor = FakeEngine(tmp_path, "b")
        await successor.start()
        await connected(client, "b")
        generation, number = await accepted(client, successor)
        successor.say(step(TokensOutput(number, 0, [9], FinishReason.STOP)))
        assert [o.token_ids async for o in read_all(generation)] == [[9]]
        await successor.die()

    run(tmp_path, script)


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\x01\x00\x00\x00\xc1"], ids=["too long", "no message"])
def test_garbage_ends_the_connection_and_starts_another(tmp_path: pathlib.Path, data: bytes) -> None:
    async def script(client: SocketEngineClient, engine: FakeEngine) -> None:
        generation, _ = await accepted(client, engine)
        engine.say_bytes(data)
        with pytest.raises(EngineDiedError):
            await anext(read_all(generation))
        await connected(client, "a")

    run(tmp_path, script)


def test_disconnect_fails_what_runs(tmp_path: pathlib.Path) -> None:
    """It was told that the engine had died."""

    async def script(client: SocketEngineClient, engine: FakeEngine) -> None:
        generation, _ = await accepted(client, engine)
        task = asyncio.create_task(client.generate(AddRequest(TokensInput([1]), GREEDY)))
        await engine.hear_add()
        await client.disconnect()
        with pytest.raises(EngineLeftError):
            await anext(read_all(generation))
        with pytest.raises(EngineLeftError):
            await asyncio.wait_for(task, TIMEOUT_S)
        with pytest.raises(EngineLeftError):
            await client.generate(AddRequest(TokensInput([1]), GREEDY))
        assert client.info is None

    run(tmp_path, script)


def test_what_depends_on_the_engine_is_told_when_it_has_gone(tmp_path: pathlib.Path) -> None:
    told = list[str]()

    async def script(client: SocketEngineClient, engine: FakeEngine) -> None:
        client.on_lost = lambda: told.append("lost")
        await engine.die()
        await disconnected(client)
        await settle()
        assert told == ["lost"]
        second = FakeEngine(tmp_path, "b")
        await second.start()
        await connected(client, "b")
        assert told == ["lost"]
        await client.disconnect()
        assert told == ["lost", "lost"]  # also at the end of this process
        await second.die()

    run(tmp_path, script)
