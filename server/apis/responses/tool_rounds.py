"""Answers to POST /v1/responses in rounds: the model calls tools of MCP servers, and goes on with their results.

The servers' tools are listed first. Each round is a task and an answer of its own, made of what the client would have
sent next: the items so far. The model ends the answer when it calls no such tool any more, or one that the client must
call or approve.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Protocol

import msgspec
from starlette.requests import Request

from weft.engine.wire.messages import FinishReason
from weft.server.apis.responses import mcp_tools
from weft.server.apis.responses.answers import McpTool, ResponseObject
from weft.server.apis.responses.input import InputItem
from weft.server.apis.responses.mcp_client import McpFailure, Outcome, call_tool, list_tools
from weft.server.apis.responses.render import ResponseRenderer
from weft.server.apis.responses.schema import ResponseBody, ResponseItem
from weft.server.apis.responses.tools import presentable
from weft.server.generate.answer import Answer
from weft.server.generate.events import CallClosed, Counts, End, Event, PromptReport
from weft.server.generate.pipeline import accepted, new_answer
from weft.server.http.context import ServerContext
from weft.server.models.served_model import ServedModel
from weft.server.task.task import Task
from weft.server.task.tool_use import HostedTool
from weft.server.text.chat_template import ChatTemplateError, TemplateOptions
from weft.server.text.text_tokenizer import TextTokenizer, TextTooLongError, TokenRoom


class ItemRenderer(Protocol):
    """Writes what happens between the rounds. The model's calls themselves are events of the answers."""

    def listed(self, label: str, tools: Sequence[McpTool], error: str | None) -> bytes:
        """The list of a server's tools."""

    def approved(self, call: mcp_tools.ApprovedCall) -> bytes:
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

    listings: Sequence[mcp_tools.Listing]
    approved: Sequence[mcp_tools.ApprovedCall]
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


class ToolRounds:
    """An answer in rounds. Implements `Report`. It has one reader, who also closes it, as an `Answer` has."""

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

    @property
    def lost(self) -> list[str]:
        """Paths of what the engine could not enforce of schemas so far."""
        return [path for answer in self._answers for path in answer.lost]

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
        names = [each.name for each in fields(Counts)]
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
        await accepted(answer, task, self._context)
        self._answers.append(answer)


@dataclass(frozen=True, slots=True)
class McpTools:
    """The MCP servers of a body, after they were listed."""

    listings: Sequence[mcp_tools.Listing]
    approved: Sequence[mcp_tools.ApprovedCall]
    hosted: mcp_tools.HostedTools

    async def call(self, label: str, name: str, arguments: str) -> Outcome:
        """Call a tool, if the body's servers have it."""
        listing = next(each for each in self.listings if each.use.label == label)
        if name not in {tool.name for tool in listing.tools}:
            reason = listing.error or f"the tools of {label} do not include {name}"
            return Outcome(None, McpFailure("mcp_protocol_error", -32602, reason).error)
        return await call_tool(listing.use.connection, name, arguments)


async def list_servers(
    body: ResponseBody, items: Sequence[InputItem], size: int, request: Request, context: ServerContext
) -> McpTools | None:
    """List the tools of the body's MCP servers that the input does not list; None if it has no such server.

    Raises:
        InvalidRequestError: A server may not be used, or the input's items about it are wrong.
    """
    uses = mcp_tools.read_servers(body.tools, context.settings)
    approved = mcp_tools.approved_calls(items, uses)
    if not uses:
        return None
    model = await context.check_model(request, body.model)  # before anybody else is asked
    known = await context.workers.run_light(size, mcp_tools.listings_in, items, uses)
    listings = await asyncio.gather(*(_listing(use, known) for use in uses))
    own_names = {tool.name for tool in body.tools or () if tool.name is not None}
    most = size + len(uses) * context.settings.mcp_max_bytes  # bytes of schemas
    listed = await context.workers.run_light(most, mcp_tools.hosted_functions, listings, own_names)
    can_show, fits = partial(_can_show, model.tokenizer), partial(_fits, model)
    functions, odd = await context.workers.run_template(model.tokenizer, most, presentable, listed, can_show, fits)
    left_out = [*(path for listing in listings for path in listing.left_out), *odd]
    prewarms = body.prompt_cache_options is not None and bool(body.prompt_cache_options.prewarm)
    return McpTools(listings, [] if prewarms else approved, mcp_tools.HostedTools(functions, left_out=left_out))


async def _listing(use: mcp_tools.McpUse, known: dict[str, mcp_tools.Listing]) -> mcp_tools.Listing:
    if use.label in known:
        return known[use.label]
    try:
        listed = await list_tools(use.connection)
    except McpFailure as failure:
        return mcp_tools.Listing(use, [], str(failure))
    return mcp_tools.Listing(use, [tool for tool in listed.tools if use.allows(tool)], left_out=listed.left_out)


def _can_show(tokenizer: TextTokenizer, tools: list[dict[str, object]]) -> bool:
    """Whether the chat template renders declarations of tools."""
    options = TemplateOptions(variables={"tools": tools}, repairs=False)
    try:
        tokenizer.render_chat([{"role": "user", "content": "Hi"}], options)
    except ChatTemplateError:
        return False
    return True


def _fits(model: ServedModel, tool: dict[str, object]) -> bool:
    """Whether a tool takes at most half of the context."""
    text, room = json.dumps(tool, ensure_ascii=False), TokenRoom(model.engine_info.max_model_len // 2)
    try:
        return len(text) <= room.num_tokens // 4 or len(model.tokenizer.encode(text, False, room)) <= room.num_tokens
    except TextTooLongError:
        return False


async def open_rounds(
    tools: McpTools,
    task: Task,
    head: ResponseObject,
    read: Callable[[list[InputItem], int, mcp_tools.HostedTools], Awaitable[Task]],
    new_renderer: Callable[[ToolRounds], ResponseRenderer],
    request: Request,
    context: ServerContext,
) -> tuple[ToolRounds, ResponseRenderer]:
    """The answer, whose first round the engine has accepted, and its renderer. The caller closes the answer.

    Args:
        read: Makes the task of the body with more items, their size in bytes, and tools of servers.

    Raises:
        ApiError: The first round was rejected.
    """

    async def next_task(may_call: bool) -> Task:
        written = msgspec.to_builtins(head.output)
        items = [InputItem(ResponseItem.model_validate(item), f"output[{i}]") for i, item in enumerate(written)]
        is_later = any(item["type"] == "mcp_call" for item in written)
        hosted = replace(tools.hosted, is_later=is_later, may_call=may_call)
        made = await read(items, len(msgspec.json.encode(written)), hosted)
        return replace(made, is_stream=True, deadline=task.deadline)

    limit = min(context.settings.mcp_max_calls, head.max_tool_calls or context.settings.mcp_max_calls)
    first = replace(task, is_stream=True)
    hosting = Hosting(tools.listings, tools.approved, first, next_task, tools.call, limit)
    rounds = ToolRounds(hosting, request, context, None)
    renderer = new_renderer(rounds)
    rounds.items = renderer
    context.metrics.of(task.model.name).note_retry(request.headers.get("x-stainless-retry-count", ""))
    await rounds.open()
    return rounds, renderer
