"""What MCP tools add to POST /v1/responses: their servers are listed, and the answer is made in rounds."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

import msgspec
from starlette.requests import Request

from weft.server.generate.rounds import Hosting, Rounds
from weft.server.http.context import ServerContext
from weft.server.mcp.client import McpFailure, Outcome, call_tool, list_tools
from weft.server.render.responses import ResponseRenderer
from weft.server.request.mcp_tools import (
    ApprovedCall,
    HostedTools,
    Listing,
    McpUse,
    approved_calls,
    hosted_functions,
    listings_in,
    read_servers,
)
from weft.server.request.response_input import InputItem
from weft.server.schemas.responses import ResponseBody, ResponseItem, ResponseObject
from weft.server.task.task import Task


@dataclass(frozen=True, slots=True)
class McpTools:
    """The MCP servers of a body, after they were listed."""

    listings: Sequence[Listing]
    approved: Sequence[ApprovedCall]
    hosted: HostedTools

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
    uses = read_servers(body.tools, context.settings)
    approved = approved_calls(items, uses)
    if not uses:
        return None
    await context.check_model(request, body.model)  # before anybody else is asked
    known = await context.workers.run_light(size, listings_in, items, uses)
    listings = await asyncio.gather(*(_listing(use, known) for use in uses))
    own_names = {tool.name for tool in body.tools or () if tool.name is not None}
    most = size + len(uses) * context.settings.mcp_max_bytes  # bytes of schemas
    functions = await context.workers.run_light(most, hosted_functions, listings, own_names)
    prewarms = body.prompt_cache_options is not None and bool(body.prompt_cache_options.prewarm)
    return McpTools(listings, [] if prewarms else approved, HostedTools(functions))


async def _listing(use: McpUse, known: dict[str, Listing]) -> Listing:
    if use.label in known:
        return known[use.label]
    try:
        tools = await list_tools(use.connection)
    except McpFailure as failure:
        return Listing(use, [], str(failure))
    return Listing(use, [tool for tool in tools if use.allows(tool)])


async def open_rounds(
    tools: McpTools,
    task: Task,
    head: ResponseObject,
    read: Callable[[list[InputItem], int, HostedTools], Awaitable[Task]],
    new_renderer: Callable[[Rounds], ResponseRenderer],
    request: Request,
    context: ServerContext,
) -> tuple[Rounds, ResponseRenderer]:
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
        made = await read(
            items, len(msgspec.json.encode(written)), replace(tools.hosted, is_later=is_later, may_call=may_call)
        )
        return replace(made, is_stream=True, deadline=task.deadline)

    limit = min(context.settings.mcp_max_calls, head.max_tool_calls or context.settings.mcp_max_calls)
    first = replace(task, is_stream=True)
    hosting = Hosting(tools.listings, tools.approved, first, next_task, tools.call, limit)
    rounds = Rounds(hosting, request, context, None)
    renderer = new_renderer(rounds)
    rounds.items = renderer
    context.metrics.of(task.model.name).note_retry(request.headers.get("x-stainless-retry-count", ""))
    await rounds.open()
    return rounds, renderer
