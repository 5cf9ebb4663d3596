"""Drives all choices of one HTTP request, from acceptance by the engine to the last event.

Owns the generations in the engine (one per prompt) and the text pipeline of every choice. Choice i belongs to prompt
i // num_choices. Invariant: whoever opens an answer closes it, and then nothing of it is left in the engine. Knows
neither JSON nor the renderer.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing

from weft.engine.wire.messages import AddRequest, FinishReason, Guidance, RequestOutput, TokensOutput
from weft.server import errors
from weft.server.generate.choice_stream import ChoiceStream
from weft.server.generate.events import Counts, End, Event, PromptReport, WholeChoice, whole_choice
from weft.server.http.metrics import RequestTimer
from weft.server.models.engine_client import EngineClient, Generation
from weft.server.task.task import Prompt

_log = logging.getLogger(__name__)


class Answer:
    """The choices of one HTTP request. Implements `Report`. It has one reader, who also closes it.

    Attributes:
        prompts: What the engine reported about each prompt.
        lost: Paths of what the engine could not enforce of schemas.
        named: Adds to an error the field that asked for the grammar.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        requests: Sequence[AddRequest],
        choices: Sequence[ChoiceStream],
        timer: RequestTimer,
        cached_block_size: int,
    ) -> None:
        """Prepare an answer; sends nothing yet.

        Args:
            requests: One for each prompt, all with the same number of choices.
            choices: The text pipelines of all choices.
            cached_block_size: Tokens per block; 0 if the prefix cache is not used.
        """
        self.prompts = [PromptReport(prompt) for prompt in prompts]
        self.lost: list[str] = []
        self.named: Callable[[errors.GrammarError], errors.GrammarError] = lambda error: error
        self._requests = requests
        self._choices = choices
        self._timer = timer
        self._cached_block_size = cached_block_size
        self._num_choices = requests[0].num_choices
        self._generations: dict[int, Generation] = {}
        self._unfinished = FinishReason.ABORT  # counted for choices that have not finished at close
        self._is_open = False
        self._num_accepted = self._num_rejected = 0  # predicted ids

    @property
    def guidance(self) -> Guidance:
        """What the engine is told of the outputs."""
        return self._requests[0].guidance

    def guide(self, guidance: Guidance) -> None:
        """Replace the guidance of an answer that was rejected."""
        self._requests = [request.again(guidance) for request in self._requests]

    async def refusal(self, engine_client: EngineClient, grammar: str) -> str | None:
        """Why the engine refuses a grammar; None: it takes it."""
        try:
            generation = await engine_client.generate(self._requests[0].probe(grammar))
        except errors.GrammarError as error:
            return error.message
        generation.close()
        return None

    async def open(self, engine_client: EngineClient) -> None:
        """Send every prompt and wait until all are accepted. If one is rejected, abort the others.

        Raises:
            ApiError: No engine is connected, or it rejected a prompt.
        """

        async def accept(index: int) -> None:
            self._generations[index] = await engine_client.generate(self._requests[index])

        try:
            # All at once: each waits for the engine's reply, which comes between two steps.
            accepts = map(accept, range(len(self._requests)))
            results = await asyncio.gather(*accepts, return_exceptions=True)
            for result in results:
                if result is not None:
                    raise result
        except BaseException:
            self.close()
            raise
        self._is_open = True
        self._timer.accept([len(report.prompt.token_ids) for report in self.prompts])

    def close(self) -> None:
        """Abort the choices that still run, and count them in the metrics. Idempotent."""
        for generation in self._generations.values():
            generation.close()
        was_open, self._is_open = self._is_open, False
        for index, choice in enumerate(self._choices):
            if was_open and not choice.is_finished:
                self._timer.finish_choice(index, self._unfinished, choice.num_output_tokens)

    async def rendered(self, render: Callable[[int, list[Event]], bytes]) -> AsyncGenerator[bytes, None]:
        """Yield each nonempty render(choice, events) as the engine produces outputs. Every choice ends with `End`.

        Raises:
            ApiError: The engine gave up a choice or disconnected. The whole answer has then failed.
        """
        try:
            async with aclosing(_merged(self._generations)) as outputs:
                async for prompt_index, output in outputs:
                    assert isinstance(output, TokensOutput), "no vector was asked for"
                    index = prompt_index * self._num_choices + output.index
                    choice = self._choices[index]
                    self._note(index, self.prompts[prompt_index], output)
                    events = choice.feed(output)
                    if events is None:
                        continue
                    if choice.is_finished:
                        self._finish(index, prompt_index, output, events[-1])
                    if data := render(index, events):
                        yield data
        except (errors.EngineDiedError, errors.EngineLeftError):
            self._unfinished = FinishReason.ERROR
            raise

    async def whole(self, num_best: int) -> list[WholeChoice]:
        """Wait for the end, and return `num_best` choices per prompt.

        If there are more, the ones with the highest mean log-probability are returned. If not, the order stays. Raises
        the same errors as `rendered`.
        """
        events: list[list[Event]] = [[] for _ in self._choices]

        def collect(index: int, new: list[Event]) -> bytes:
            events[index] += new
            return b""

        async with aclosing(self.rendered(collect)) as nothing:
            async for _ in nothing:
                pass
        shown: list[int] = []
        for first in range(0, len(self._choices), self._num_choices):
            made = range(first, first + self._num_choices)
            is_all = num_best == self._num_choices
            shown += made if is_all else sorted(made, key=lambda i: -self._choices[i].mean_logprob)[:num_best]
        return [whole_choice(index, events[index]) for index in shown]

    def prompt_of(self, index: int) -> PromptReport:
        """The prompt that choice `index` continues."""
        return self.prompts[index // self._num_choices]

    def counts(self) -> Counts:
        """Tokens so far."""
        totals = [len(report.prompt.token_ids) for report in self.prompts]
        cached = [report.num_cached_tokens or 0 for report in self.prompts]
        block = self._cached_block_size  # only full blocks are cached
        written = [max(0, t // block * block - c) if block else 0 for t, c in zip(totals, cached, strict=True)]
        return Counts(
            sum(totals),
            sum(cached),
            sum(written),
            sum(choice.num_output_tokens for choice in self._choices),
            sum(choice.num_reasoning_tokens for choice in self._choices),
            self._num_accepted,
            self._num_rejected,
        )

    def _note(self, index: int, report: PromptReport, output: TokensOutput) -> None:
        if report.num_cached_tokens is None:
            report.num_cached_tokens = output.num_cached_tokens
        if output.prompt_logprobs is not None and report.logprobs_source in (None, output.index):
            report.logprobs_source = output.index
            report.logprobs = (report.logprobs or []) + output.prompt_logprobs
        self._num_accepted += output.num_accepted_predictions
        self._num_rejected += output.num_rejected_predictions
        if not self._choices[index].is_finished:
            self._timer.note_output(index, output, time.monotonic())

    def _finish(self, index: int, prompt_index: int, output: TokensOutput, end: Event) -> None:
        """Record the end of a choice. If a stop string ended it, abort it in the engine."""
        assert isinstance(end, End)
        self._timer.finish_choice(index, end.reason, self._choices[index].num_output_tokens)
        error = failure(end.reason, output.message)
        if error is not None:
            if end.reason not in (FinishReason.TIMEOUT, FinishReason.DEAD_END):  # caused by the request itself
                _log.error("the engine gave a request up: %s: %s", end.reason.name, output.message)
            raise self.named(error) if isinstance(error, errors.GrammarError) else error
        if output.finish_reason is None:
            self._generations[prompt_index].abort(output.index)


def failure(reason: FinishReason, message: str | None) -> errors.ApiError | None:
    """The error for an output that ended abnormally; None if it ended normally."""
    match reason:
        case FinishReason.TIMEOUT:
            return errors.DeadlineError("the client's deadline passed while the request waited")
        case FinishReason.ERROR:
            return errors.InternalError("the engine failed on this request; the server's log has the details")
        case FinishReason.ABORT:
            return errors.EngineRestartingError("the engine stopped this request; try again")
        case FinishReason.DEAD_END:
            return errors.GrammarError(message or "the grammar cannot be followed any further")
        case _:
            return None


async def _merged(generations: Mapping[int, Generation]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Yield (index of the generation, output) from all generations, in order of arrival."""
    if len(generations) == 1:
        async for output in generations[0]:
            yield 0, output
        return
    # Room for one item: if the reader is slow, outputs stay in the mailboxes, which merge them.
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
