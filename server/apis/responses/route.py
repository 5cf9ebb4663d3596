"""POST /v1/responses, its tokens counted, and the task that a body becomes."""

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from weft.server.apis.openai.pages import json_answer
from weft.server.apis.openai.tokenize import count_chat_tokens
from weft.server.apis.responses import options
from weft.server.apis.responses.background import BackgroundRun, followed
from weft.server.apis.responses.input import (
    InputItem,
    InputItems,
    conversation_id,
    input_items,
    input_messages,
    shortened,
)
from weft.server.apis.responses.mcp_tools import NO_HOSTED, HostedTools
from weft.server.apis.responses.render import ResponseOptions, ResponseRenderer, error_event
from weft.server.apis.responses.schema import ResponseBody
from weft.server.apis.responses.sealing import Sealer
from weft.server.apis.responses.stored import StoredResponse, extend, grown, items_to_store
from weft.server.apis.responses.stored import load_conversation as load_conversation
from weft.server.apis.responses.tool_rounds import ToolRounds, list_servers, open_rounds
from weft.server.errors import ApiError, InvalidRequestError
from weft.server.generate.answer import Answer
from weft.server.generate.events import Renderer
from weft.server.generate.pipeline import open_answer, respond
from weft.server.generate.prompts import encode_now, num_prompt_tokens
from weft.server.http.auth import tenant_of
from weft.server.http.context import Context, ServerContext, early_headers_while_loading, with_early_headers
from weft.server.http.sse import EventStream
from weft.server.models.served_model import ServedModel
from weft.server.store.transaction import Transaction
from weft.server.task.body import BodyRoute
from weft.server.task.pictures import read_pictures
from weft.server.task.read_body import read_task
from weft.server.task.task import Chat, OutputWishes, Task
from weft.server.task.validation import ignored_fields, ignored_header, note_left_out, require_task
from weft.server.text.text_tokenizer import TextTooLongError, TokenRoom

router = APIRouter(route_class=BodyRoute)
Open = Callable[[Task], Awaitable[tuple[Answer | ToolRounds, Renderer]]]
"""Opens the answer to a task, in rounds if the body has MCP tools."""


@router.post("/v1/responses")
async def create_response(body: ResponseBody, request: Request, context: Context) -> Response:
    """Answer a conversation: streamed, whole, or in the background."""
    response = _response(body, request, context)
    if body.stream and any(tool.type == "mcp" for tool in body.tools or ()):  # listing their servers takes time
        return await with_early_headers(response, error_event, context.settings.sse_ping_s)
    return await early_headers_while_loading(response, body, context, error_event)


async def _response(body: ResponseBody, request: Request, context: ServerContext) -> Response:
    if body.background and body.store is False:
        raise InvalidRequestError("background needs store: the response is read from there", param="background")
    items, tenant = await input_items(body, request, context), tenant_of(request)
    sealer = await context.store.run(lambda: Sealer(context.store.folder, tenant))
    tools = await list_servers(body, items.all, items.size, request, context)
    task = await _read(body, items, sealer, request, context, tools.hosted if tools else NO_HOSTED)
    seal = sealer.seal if options.ENCRYPTED in (body.include or ()) else None
    pads = bool(body.stream_options and body.stream_options.include_obfuscation)
    shows = ResponseOptions(options.num_logprobs(body), pads, seal)
    head = options.new_response(body, conversation_id(body), task)
    new_renderer = partial(ResponseRenderer, task, head, shows)
    if tools is None and not head.store and head.conversation is None:
        return await respond(task, request, context, new_renderer)

    async def open_(task: Task) -> tuple[Answer | ToolRounds, Renderer]:
        if tools is None:
            return await open_answer(task, request, context, new_renderer)
        return await open_rounds(tools, task, head, read_more, new_renderer, request, context)

    async def read_more(more: list[InputItem], num_bytes: int, hosted: HostedTools) -> Task:
        longer = replace(items, own=[*items.own, *more], size=items.size + num_bytes)
        return await _read(body, longer, sealer, request, context, hosted)

    own = items_to_store((each.item for each in items.own), head.id)
    if head.conversation is not None:
        id = head.conversation["id"]
        await context.store.read(lambda each: grown(each, load_conversation(each, id, tenant), tenant, own, "input"))
    if body.background:
        return await _in_background(task, request, context, open_, own)
    return await _kept(task, request, context, open_, own)


@router.post("/v1/responses/input_tokens")
async def count_input_tokens(body: ResponseBody, request: Request, context: Context) -> Response:
    """Count the tokens that a response with this input would read."""
    model, size = await context.check_model(request, body.model), len(await request.body())
    require_task(model, "generate")
    ignored = await context.workers.run_light(
        size, ignored_fields, body, options.REFUSED, strict=context.settings.strict_params, accepted=options.ACCEPTED
    )
    items = await input_items(body, request, context)
    sealer = await context.store.run(lambda: Sealer(context.store.folder, tenant_of(request)))
    tools = await list_servers(body, items.all, items.size, request, context)
    hosted = tools.hosted if tools else NO_HOSTED
    given = items.all, sealer, model, request, context, items.size, hosted
    chat, wishes = await read_chat(body, *given, is_counted=True)
    num_tokens = await count_chat_tokens(chat, model, items.size, context.workers)
    answer = {"object": "response.input_tokens", "input_tokens": num_tokens}
    return json_answer(answer, ignored_header([*wishes.left_out, *ignored]))


async def _in_background(
    task: Task, request: Request, context: ServerContext, open_: Open, own: list[dict[str, Any]]
) -> Response:
    tenant = tenant_of(request)
    answer, renderer = await open_(replace(task, is_stream=True, deadline=None))
    headers = ignored_header([*task.ignored, *answer.lost])
    assert isinstance(renderer, ResponseRenderer)
    try:
        response = renderer.response
        response.status = "queued"
        stored = StoredResponse(msgspec.to_builtins(response), own)
        first = msgspec.json.encode(response)
        await context.store.write(lambda transaction: transaction.put(stored.row(tenant)))
        run = BackgroundRun(answer, renderer, stored, tenant, renderer.begin())
    except BaseException:
        answer.close()
        raise
    run.start(context)
    if not task.is_stream:
        return Response(first, headers=headers, media_type="application/json")
    return followed(context, response.id, tenant, -1, headers)


async def _kept(
    task: Task, request: Request, context: ServerContext, open_: Open, own: list[dict[str, Any]]
) -> Response:
    """Answer, and store the response or what it adds to its conversation before its end is sent."""
    tenant = tenant_of(request)
    answer, renderer = await open_(task)
    headers = ignored_header([*task.ignored, *answer.lost])
    assert isinstance(renderer, ResponseRenderer)

    async def keep() -> None:
        if not renderer.response.store and renderer.response.conversation is None:
            return
        stored = StoredResponse(msgspec.to_builtins(renderer.response), own)

        def work(transaction: Transaction) -> None:
            extend(transaction, tenant, stored.response, own)
            if renderer.response.store:
                transaction.put(stored.row(tenant))

        await context.store.write(work)

    async def events() -> AsyncGenerator[bytes, None]:
        async with aclosing(answer.rendered(renderer.stream)) as parts:
            async for data in parts:
                yield data
        renderer.finish()
        await keep()

    if task.is_stream:
        return EventStream(
            events(),
            renderer.stream_end,
            renderer.stream_error,
            headers=headers,
            ping_s=context.settings.sse_ping_s,
            close=answer.close,
        )
    try:
        if isinstance(answer, ToolRounds):  # their items are in an order that no choice can tell
            try:
                async for _ in events():
                    pass
            except ApiError as error:
                if not answer.num_calls:
                    raise
                renderer.fail(error)  # no error status: a client that tries again would make the calls twice
                with contextlib.suppress(ApiError):
                    await keep()
            return json_answer(renderer.response, headers)
        choices = await answer.whole(task.num_choices)
    finally:
        answer.close()  # also if this task is cancelled
    data = renderer.whole(choices)
    await keep()
    return Response(data, headers=headers, media_type="application/json")


async def _read(
    body: ResponseBody, items: InputItems, sealer: Sealer, request: Request, context: ServerContext, hosted: HostedTools
) -> Task:
    model = await context.check_model(request, body.model)
    require_task(model, "generate")
    logprobs, max_tokens = options.num_logprobs(body), options.max_output_tokens(body)
    chat, wishes = await read_chat(body, items.all, sealer, model, request, context, items.size, hosted)
    task = await read_task(
        body,
        request,
        context,
        options.REFUSED,
        input=chat,
        wishes=wishes,
        max_tokens=max_tokens,
        logprobs=logprobs,
        user=body.safety_identifier or body.user,
        accepted=options.ACCEPTED,
    )
    return replace(task, size=items.size)


async def read_chat(
    body: ResponseBody,
    items: list[InputItem],
    sealer: Sealer,
    model: ServedModel,
    request: Request,
    context: ServerContext,
    size: int,
    hosted: HostedTools = NO_HOSTED,
    *,
    is_counted: bool = False,
) -> tuple[Chat, OutputWishes]:
    """The messages for the template, and what the output must be."""
    max_tokens = options.max_output_tokens(body)
    strict = context.settings.strict_params
    wishes = await context.workers.run_light(size, options.read_wishes, body, model.formats, hosted, strict=strict)
    made = await context.workers.run_light(
        size,
        input_messages,
        items,
        body.instructions,
        model.formats.tools,
        body.prompt_cache_options,
        shows_old_reasoning=not (body.reasoning and body.reasoning.context == "current_turn"),
        unseal=sealer.unseal,
        may_be_empty=options.is_prewarm(body),
    )
    wishes = replace(wishes, left_out=[*wishes.left_out, *made.left_out])
    note_left_out(wishes.left_out)
    shown = options.template_options(body, wishes, model.tokenizer)
    made.spans.beyond = "leave" if body.truncation == "auto" else "read" if is_counted else "refuse"
    await read_pictures(made.spans, model, request, context)
    chat = Chat(made.messages, shown, made.breakpoints, "input", made.spans)
    if body.truncation == "auto":
        room = TokenRoom(num_prompt_tokens(model.engine_info.max_model_len, max_tokens, is_bound=not strict))
        fits = partial(_fits, model, room)
        chat = await context.workers.run_template(model.tokenizer, size, shortened, chat, fits)
    return chat, wishes


def _fits(model: ServedModel, room: TokenRoom, chat: Chat) -> bool:
    try:
        token_ids = encode_now(model.tokenizer, chat, room)
    except TextTooLongError:
        return False
    except ApiError as error:
        if error is chat.spans.left:
            return False
        raise
    return len(token_ids) <= room.num_tokens
