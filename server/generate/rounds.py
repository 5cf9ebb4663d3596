"""An answer in rounds: the model calls tools that this server calls for it, and goes on with their results.

Each round is a task and an answer of its own, made of what the client would have sent next: the items so far. The model
ends the answer when it calls no such tool any more, or one that the client must call or approve.
"""

import dataclasses
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Protocol

import msgspec
from starlette.requests import Request

from weft.engine.shared.messages import FinishReason
from weft.server.generate.answer import Answer
from weft.server.generate.events import CallClosed, Counts, End, Event, PromptReport
from weft.server.generate.output_plan import naming_the_grammar
from weft.server.generate.pipeline import new_answer
from weft.server.http.context import ServerContext
from weft.server.mcp.client import McpFailure, Outcome
from weft.server.request.mcp_tools import ApprovedCall, Listing
from weft.server.schemas.mcp import McpTool
from weft.server.task.task import Task
from weft.server.task.tool_use import HostedTool


class ItemRenderer(Protocol):
    """Writes what happens between the rounds. The model's calls themselves are events of the answers."""

    def listed(self, label: str, tools: Sequence[McpTool], error: str | None) -> bytes:
        """The list of a server's tools."""

    def approved(self, call: ApprovedCall) -> bytes:
        """A call that the client has approved begins."""

    def called(self, output: str | None, error: dict[str, object] | None) -> bytes:
        """The oldest call without a result has this one."""


@dataclass(frozen=True, slots=True)
class Hosting:
    """What rounds are made of.

    Attributes:
        listings: The servers' tools; the response shows those lists that are not old.
        approved: Calls to make before the first round.
        first_task: The task before any call.
        next_task: Makes the task of the next round from all that was written; False: it may call no tool.
        call: Calls a tool: label of its server, name, arguments.
        max_calls: Most calls of all rounds; beyond it a call fails.
    """

    listings: Sequence[Listing]
    approved: Sequence[ApprovedCall]
    first_task: Task
    next_task: Callable[[bool], Awaitable[Task]]
    call: Callable[[str, str, str], Awaitable[Outcome]]
    max_calls: int


@dataclass(slots=True)
class _Made:
    """What a round has made: calls for this server, whether there are others, and its end."""

    calls: list[CallClosed] = field(default_factory=list)
    has_others: bool = False
    end: End = End(FinishReason.ABORT)  # noqa: RUF009  # a tuple


class Rounds:
    """The answer. Implements `Report`. It has one reader, who also closes it, as an `Answer` has."""

    def __init__(self, hosting: Hosting, request: Request, context: ServerContext, items: ItemRenderer | None) -> None:
        """Prepare; sends nothing yet. `items` may be set later, before the answer is read."""
        self.items = items
        self._hosting = hosting
        self._request = request
        self._context = context
        self._task = hosting.first_task
        self._answers: list[Answer] = []
        self.num_calls = 0
        """Calls of tools that were made: what they did is not undone if the answer fails."""

    async def open(self) -> None:
        """Let the engine accept the first round, unless calls come before it.

        Raises:
            ApiError: As `Answer.open` does.
        """
        if not self._hosting.approved:
            await self._open_round(self._task)

    def close(self) -> None:
        """End the round that runs. A tool's call ends with the reader, who waits for it."""
        for answer in self._answers[-1:]:
            answer.close()

    async def rendered(self, render: Callable[[int, list[Event]], bytes]) -> AsyncGenerator[bytes, None]:
        """Yield the renderers' bytes of everything that happens.

        Raises:
            ApiError: A round was rejected, or failed.
        """
        items, hosting = self.items, self._hosting
        assert items is not None, "it is set before the answer is read"
        for listing in hosting.listings:
            if not listing.is_old:
                yield items.listed(listing.use.label, listing.tools, listing.error)
        for call in hosting.approved:
            yield items.approved(call)
            yield items.called(*await self._outcome(call.label, call.name, call.arguments))
        goes_on = bool(self._answers) or await self._next_round()
        while goes_on:
            made = _Made()
            async with aclosing(self._answers[-1].rendered(self._noting(made, render))) as parts:
                async for data in parts:
                    yield data
            self.close()
            if made.end.reason is FinishReason.STOP:
                for closed in made.calls:
                    tool = self._tool(closed.name)
                    yield items.called(*await self._outcome(tool.label, tool.name, closed.arguments))
            if made.end.reason is not FinishReason.STOP or made.has_others or not made.calls:
                yield render(0, [made.end])
                return
            goes_on = await self._next_round()
        yield render(0, [End(FinishReason.LENGTH)])

    @property
    def prompts(self) -> Sequence[PromptReport]:
        """The prompts of all rounds."""
        return [report for answer in self._answers for report in answer.prompts]

    def prompt_of(self, index: int) -> PromptReport:
        """The prompt of the round that runs."""
        return self._answers[-1].prompt_of(index)

    def counts(self) -> Counts:
        """Tokens of all rounds so far."""
        totals = [answer.counts() for answer in self._answers]
        names = [each.name for each in dataclasses.fields(Counts)]
        return Counts(**{name: sum(getattr(each, name) for each in totals) for name in names})

    def _tool(self, name: str) -> HostedTool:
        assert self._task.wishes.use is not None, "there is a call"
        return self._task.wishes.use.hosted[name]

    def _noting(self, made: _Made, render: Callable[[int, list[Event]], bytes]) -> Callable[[int, list[Event]], bytes]:
        """Render the events of a round, but not its end, which may not be that of the answer."""
        use = self._task.wishes.use
        hosted = use.hosted if use else {}

        def note(index: int, events: list[Event]) -> bytes:
            shown: list[Event] = []
            for event in events:
                if isinstance(event, End):
                    made.end = event
                    continue
                shown.append(event)
                if isinstance(event, CallClosed):
                    tool = hosted.get(event.name)
                    if tool is None or tool.needs_approval:
                        made.has_others = True
                    else:
                        made.calls.append(event)
            return render(index, shown)

        return note

    async def _outcome(self, label: str, name: str, arguments: str) -> Outcome:
        if self.num_calls >= self._hosting.max_calls:
            message = f"not called: a response may make at most {self._hosting.max_calls} calls"
            return Outcome(None, McpFailure("mcp_protocol_error", -32600, message).error)
        self.num_calls += 1
        return await self._hosting.call(label, name, arguments)

    async def _next_round(self) -> bool:
        """Open the next round. False: no tokens are left for it."""
        task = await self._hosting.next_task(self.num_calls < self._hosting.max_calls)
        if task.sampling.max_tokens is not None:
            room = task.sampling.max_tokens - self.counts().output_tokens
            if room <= 0:
                return False
            task = replace(task, sampling=msgspec.structs.replace(task.sampling, max_tokens=room))
        self._request.state.arrival_time = time.monotonic()  # for the metrics: a round is a request of its own
        await self._open_round(task)
        return True

    async def _open_round(self, task: Task) -> None:
        self._task = task
        _, answer = await new_answer(task, self._request, self._context)
        with naming_the_grammar(task.wishes):
            await answer.open(task.model.engine_client)
        self._answers.append(answer)
