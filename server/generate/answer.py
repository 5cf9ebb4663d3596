"""All choices of one HTTP request, from acceptance to the last delta.

Owns the generations in the engine (one per prompt) and the text pipeline of every choice. Choice i belongs to prompt
i // num_choices. Invariant: whoever opened an answer closes it, and then nothing of it is left in the engine.
Knows no JSON.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

from weft.engine.shared.messages import AddRequest, FinishReason, RequestOutput, TokenLogprobs
from weft.server.errors import ApiError, DeadlineError, EngineRestartingError, GrammarError, InternalError
from weft.server.generate.choice_stream import ChoiceStream, Delta
from weft.server.generate.engine_client import EngineClient, EngineDiedError, EngineLeftError, Generation
from weft.server.http.metrics import RequestTimer

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt.

    Attributes:
        text: What the caller wrote; None when it came as token ids or as messages.
    """

    token_ids: list[int]
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Order:
    """What is asked of the engine: one request for each prompt, alike in all but input and seed."""

    prompts: Sequence[Prompt]
    requests: Sequence[AddRequest]


@dataclass(slots=True)
class PromptState:
    """What the engine said about one prompt; None until it did. Written by `Answer` alone."""

    num_cached_tokens: int | None = None
    logprobs: list[TokenLogprobs] | None = None
    logprobs_source: int | None = None


@dataclass(frozen=True, slots=True)
class Counts:
    """Tokens of an answer so far: every prompt once, every choice."""

    prompt_tokens: int
    cached_tokens: int
    cache_write_tokens: int
    output_tokens: int
    accepted_predictions: int = 0
    rejected_predictions: int = 0


class Answer:
    """The choices of one HTTP request. Has one reader, who also closes it.

    Attributes:
        choices: The text pipelines, by choice.
        prompts: What the engine said, by prompt.
    """

    def __init__(self, order: Order, choices: list[ChoiceStream], timer: RequestTimer, cached_block_size: int) -> None:
        """Ask nothing yet. `cached_block_size` is 0 when there is no prefix cache."""
        self.order = order
        self.choices = choices
        self.prompts = [PromptState() for _ in order.prompts]
        self._timer = timer
        self._cached_block_size = cached_block_size
        self._generations: dict[int, Generation] = {}
        self._unfinished = FinishReason.ABORT  # how choices count that have not finished when it is closed
        self._is_open = False
        self._num_accepted = self._num_rejected = 0  # ids of the prediction

    async def open(self, engine_client: EngineClient) -> None:
        """Have every prompt accepted; when one is not, none stays behind.

        Raises:
            EngineUnavailableError: No engine is connected.
            RequestRejectedError: The engine did not take a prompt in.
        """

        async def accept(index: int) -> None:
            self._generations[index] = await engine_client.generate(requests[index])

        requests = self.order.requests
        try:
            # Together, because each waits for the engine's answer, which comes between two steps.
            accepts = (accept(index) for index in range(len(requests)))
            results = await asyncio.gather(*accepts, return_exceptions=True)
            for result in results:
                if result is not None:
                    raise result
        except BaseException:
            self.close()
            raise
        self._is_open = True

    def close(self) -> None:
        """Abort whatever still runs, and count it. Idempotent."""
        for generation in self._generations.values():
            generation.close()
        was_open, self._is_open = self._is_open, False
        for index, choice in enumerate(self.choices):
            if was_open and not choice.is_finished:
                self._timer.finish_choice(index, self._unfinished, choice.num_output_tokens)

    def deltas(self) -> AsyncGenerator[tuple[int, Delta], None]:
        """Yield (choice, delta); otherwise as `rendered`."""
        return self.rendered(lambda index, delta: (index, delta))

    async def rendered(self, render: Callable[[int, Delta], T]) -> AsyncGenerator[T, None]:
        """Yield render(choice, delta) as the engine produces; every choice's last delta has a finish reason.

        Raises:
            ApiError: The engine gave a choice up; nothing of the answer is of use then.
            EngineDiedError: The engine went away.
            EngineLeftError: This server left it.
        """
        try:
            async with aclosing(_merged(self._generations)) as outputs:
                async for prompt_index, output in outputs:
                    index = prompt_index * self.order.requests[0].num_choices + output.index
                    self._note(index, prompt_index, output)
                    delta = self.choices[index].feed(output)
                    if delta is None:
                        continue
                    if delta.finish_reason is not None:
                        self._finish(index, prompt_index, output, delta.finish_reason)
                    yield render(index, delta)
        except (EngineDiedError, EngineLeftError):
            self._unfinished = FinishReason.ERROR
            raise

    async def whole(self) -> list[Delta]:
        """Wait for the end; by choice, all its deltas as one. Raises as `deltas` does."""
        parts: list[list[Delta]] = [[] for _ in self.choices]
        async with aclosing(self.deltas()) as deltas:
            async for index, delta in deltas:
                parts[index].append(delta)
        return [
            Delta(
                "".join(delta.text for delta in of_choice),
                [token for delta in of_choice for token in delta.tokens],
                of_choice[-1].finish_reason,
                of_choice[-1].stop_reason,
                of_choice[-1].num_content,
            )
            for of_choice in parts
        ]

    def counts(self) -> Counts:
        """Tokens so far."""
        totals = [len(prompt.token_ids) for prompt in self.order.prompts]
        cached = [state.num_cached_tokens or 0 for state in self.prompts]
        block = (
            self._cached_block_size if self.order.requests[0].caching.is_used else 0
        )  # only whole blocks can be found again
        written = [max(0, t // block * block - c) if block else 0 for t, c in zip(totals, cached, strict=True)]
        num_output_tokens = sum(choice.num_output_tokens for choice in self.choices)
        return Counts(sum(totals), sum(cached), sum(written), num_output_tokens, self._num_accepted, self._num_rejected)

    def _note(self, index: int, prompt_index: int, output: RequestOutput) -> None:
        state = self.prompts[prompt_index]
        if state.num_cached_tokens is None:
            state.num_cached_tokens = output.num_cached_tokens
        if output.prompt_logprobs is not None and state.logprobs_source in (None, output.index):
            state.logprobs_source = output.index
            state.logprobs = (state.logprobs or []) + output.prompt_logprobs
        self._num_accepted += output.num_accepted_predictions
        self._num_rejected += output.num_rejected_predictions
        if not self.choices[index].is_finished:
            self._timer.note_output(index, output, time.monotonic())

    def _finish(self, index: int, prompt_index: int, output: RequestOutput, reason: FinishReason) -> None:
        """Take note of a choice's last delta; stop the engine when only the text is at its end."""
        self._timer.finish_choice(index, reason, self.choices[index].num_output_tokens)
        error = _failure(reason, output.message)
        if error is not None:
            if reason not in (FinishReason.TIMEOUT, FinishReason.DEAD_END):  # those were the client's own wishes
                _log.error("the engine gave a request up: %s: %s", reason.name, output.message)
            raise error
        if output.finish_reason is None:
            self._generations[prompt_index].abort(output.index)


def _failure(reason: FinishReason, message: str | None) -> ApiError | None:
    """What the client is told when an output did not end as outputs should."""
    match reason:
        case FinishReason.TIMEOUT:
            return DeadlineError("the client's deadline passed while the request waited")
        case FinishReason.ERROR:
            return InternalError("the engine failed on this request; the server's log has the details")
        case FinishReason.ABORT:
            return EngineRestartingError("the engine stopped this request; try again")
        case FinishReason.DEAD_END:
            return GrammarError(message or "the grammar cannot be followed any further")
        case _:
            return None


async def _merged(generations: Mapping[int, Generation]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Yield (generation, output) of all of them, as they come."""
    if len(generations) == 1:
        async for output in generations[0]:
            yield 0, output
        return
    # Room for one item: a slow reader must leave the outputs in the mailboxes, where they merge.
    arrived: asyncio.Queue[tuple[int, RequestOutput] | Exception | None] = asyncio.Queue(maxsize=1)

    async def pump(index: int, generation: Generation) -> None:
        try:
            async for output in generation:
                await arrived.put((index, output))
        except Exception as exc:
            await arrived.put(exc)
        else:
            await arrived.put(None)

    tasks = [asyncio.create_task(pump(i, generation)) for i, generation in generations.items()]
    num_running = len(tasks)
    try:
        while num_running:
            item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
