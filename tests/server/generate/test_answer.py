import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.server.conftest import MODEL
from weft.engine.wire.inputs import TokensInput
from weft.engine.wire.messages import AddRequest, FinishReason, RejectReason, RequestOutput, TokensOutput
from weft.engine.wire.params import SamplingParams
from weft.server.errors import EngineDiedError, QueueFullError, rejection
from weft.server.generate.answer import Answer
from weft.server.generate.choice_stream import ChoiceStream
from weft.server.generate.events import End, Event, Text
from weft.server.http.metrics import RequestTimer
from weft.server.task.task import Prompt, TextOptions


class Generation:
    """Hands out what is put in; None ends it, an exception breaks it."""

    def __init__(self) -> None:
        self.put: asyncio.Queue[RequestOutput | Exception | None] = asyncio.Queue()
        self.num_closed = 0

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        while (item := await self.put.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item

    def abort(self, index: int | None = None) -> None:
        raise AssertionError("nothing stops here")

    def close(self) -> None:
        self.num_closed += 1


class Engine:
    """Accepts the prompt [i] with generations[i], or refuses it, or never answers (None)."""

    def __init__(self, answers: list[Generation | Exception | None]) -> None:
        self._answers = answers

    async def generate(self, request: AddRequest) -> Generation:
        answer = self._answers[request.input.token_ids[0]]
        if answer is None:
            await asyncio.sleep(60)
        if isinstance(answer, Exception):
            raise answer
        assert answer is not None
        return answer


def answer_for(site: Any, num_prompts: int) -> Answer:
    prompts = [Prompt([i]) for i in range(num_prompts)]
    requests = [AddRequest(TokensInput(prompt.token_ids), SamplingParams()) for prompt in prompts]
    choices = [ChoiceStream(site.tokenizer.detokenizer(), TextOptions()) for _ in prompts]
    timer = RequestTimer(site.app.state.context.metrics.of(MODEL), 0.0, num_prompts)
    return Answer(prompts, requests, choices, timer, 4)


def test_when_one_prompt_is_refused_the_others_are_given_up(site: Any) -> None:
    accepted = Generation()
    engine: Any = Engine([accepted, rejection(RejectReason.QUEUE_FULL, "full")])
    with pytest.raises(QueueFullError):
        asyncio.run(answer_for(site, 2).open(engine))
    assert accepted.num_closed == 1


def test_when_opening_is_cancelled_what_was_accepted_is_given_up(site: Any) -> None:
    accepted = Generation()
    engine: Any = Engine([accepted, None])

    async def run() -> None:
        task = asyncio.create_task(answer_for(site, 2).open(engine))
        for _ in range(20):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())
    assert accepted.num_closed == 1


def test_outputs_of_several_prompts_come_as_they_are_made(site: Any) -> None:
    first, second = Generation(), Generation()
    engine: Any = Engine([first, second])

    async def run() -> list[tuple[int, Event]]:
        answer = answer_for(site, 2)
        await answer.open(engine)
        seen: list[tuple[int, Event]] = []

        def render(index: int, events: list[Event]) -> bytes:
            seen.extend((index, event) for event in events)
            return b"x"

        rendered = answer.rendered(render)
        for generation, letter in ((second, "a"), (first, "b"), (second, "c")):
            generation.put.put_nowait(TokensOutput(0, 0, [ord(letter)]))
            await anext(rendered)
        for generation in (first, second):
            generation.put.put_nowait(TokensOutput(0, 0, [], FinishReason.LENGTH))
            generation.put.put_nowait(None)
        assert [data async for data in rendered] == [b"x"] * 2
        return seen

    seen = asyncio.run(run())
    assert [(index, event[0]) for index, event in seen[:3]] == [(1, "a"), (0, "b"), (1, "c")]
    assert all(isinstance(event, Text) for _, event in seen[:3])
    assert sorted(seen[3:]) == [(index, End(FinishReason.LENGTH)) for index in (0, 1)]


def test_one_broken_generation_breaks_the_answer(site: Any) -> None:
    first, second = Generation(), Generation()
    engine: Any = Engine([first, second])

    async def run() -> None:
        answer = answer_for(site, 2)
        await answer.open(engine)
        second.put.put_nowait(EngineDiedError())
        try:
            await answer.whole(1)
        finally:
            answer.close()
        assert len(asyncio.all_tasks()) == 1

    with pytest.raises(EngineDiedError):
        asyncio.run(run())
    assert (first.num_closed, second.num_closed) == (1, 1)


def test_a_failure_is_logged_with_the_engines_words(site: Any, caplog: pytest.LogCaptureFixture) -> None:
    site.engine.finish = FinishReason.ERROR
    assert site.chat().status == 500
    assert "the engine gave a request up: ERROR" in caplog.text


def test_a_deadline_is_not_logged_as_a_failure(site: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A request that its client's own deadline ended was an error in the log, as if the engine had failed."""
    site.engine.finish = FinishReason.TIMEOUT
    assert site.chat().status == 504
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("end", "reason"), [(None, FinishReason.ABORT), (EngineDiedError(), FinishReason.ERROR)], ids=["left", "died"]
)
def test_what_did_not_finish_is_counted_once(site: Any, end: Exception | None, reason: FinishReason) -> None:
    """A client that left, or an engine that died, was in no metric: finished_reason="abort" stayed at zero."""
    generation = Generation()
    engine: Any = Engine([generation])

    async def run() -> None:
        answer = answer_for(site, 1)
        await answer.open(engine)
        generation.put.put_nowait(TokensOutput(0, 0, [97]) if end is None else end)
        try:
            await anext(answer.rendered(lambda index, events: b"x"))
        except EngineDiedError:
            assert end is not None
        answer.close()
        answer.close()

    asyncio.run(run())
    success = site.app.state.context.metrics.of(MODEL).success
    assert {r: counter._value.get() for r, counter in success.items() if counter._value.get()} == {reason: 1}
