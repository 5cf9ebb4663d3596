"""POST /v1/responses: turns a body into a task."""

import secrets
import time
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from weft.server.generate.pipeline import respond
from weft.server.generate.prompts import encode_chat
from weft.server.generate.shorten import shortened
from weft.server.http.context import ServerContext, get_context
from weft.server.model.served_model import ServedModel
from weft.server.render.responses import ResponseOptions, ResponseRenderer
from weft.server.request.body import BodyRoute
from weft.server.request.fields import ACCEPTED_IN_RESPONSES, REFUSED_IN_RESPONSES
from weft.server.request.read_body import read_task
from weft.server.request.response_input import InputItem, input_messages
from weft.server.request.response_options import max_output_tokens, num_logprobs, read_wishes, template_options
from weft.server.request.task import Chat, Task
from weft.server.schemas.responses import ResponseBody, ResponseItem, ResponseObject, ResponseTool
from weft.server.text.long_text import Room, TextTooLongError

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/responses")
async def create_response(
    body: ResponseBody, request: Request, context: Annotated[ServerContext, Depends(get_context)]
) -> Response:
    """Answer a conversation, streamed or whole."""
    task = await _read(body, request, context)
    shows = ResponseOptions(num_logprobs(body), bool(body.stream_options and body.stream_options.include_obfuscation))
    return await respond(task, request, context, partial(ResponseRenderer, task, _head(body, task), shows))


async def _read(body: ResponseBody, request: Request, context: ServerContext) -> Task:
    model, size = await context.check_model(request, body.model), len(await request.body())
    logprobs, max_tokens = num_logprobs(body), max_output_tokens(body)
    wishes = await context.workers.run_light(size, read_wishes, body, model.formats)
    messages, breakpoints = await context.workers.run_light(
        size,
        input_messages,
        own_items(body),
        body.instructions,
        model.formats.tools,
        body.prompt_cache_options,
        shows_old_reasoning=not (body.reasoning and body.reasoning.context == "current_turn"),
    )
    chat = Chat(messages, template_options(body, wishes, model.tokenizer), breakpoints, "input")
    if body.truncation == "auto":
        room = model.engine_info.max_model_len - (1 if max_tokens is None else max_tokens)
        chat = await context.workers.run(size, shortened, chat, partial(_fits, model, Room(room)))
    return await read_task(
        body,
        request,
        context,
        REFUSED_IN_RESPONSES,
        input=chat,
        wishes=wishes,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=None,
        user=body.safety_identifier or body.user,
        accepted=ACCEPTED_IN_RESPONSES,
    )


def own_items(body: ResponseBody) -> list[InputItem]:
    """The items of the body itself."""
    if isinstance(body.input, str):
        return [InputItem(ResponseItem(type="message", role="user", content=body.input), "input")]
    return [InputItem(item, f"input[{i}]") for i, item in enumerate(body.input)]


def _fits(model: ServedModel, room: Room, chat: Chat) -> bool:
    try:
        token_ids, _ = encode_chat(model.tokenizer, Chat(chat.messages, chat.options, param=chat.param), room)
    except TextTooLongError:
        return False
    return len(token_ids) <= room.num_tokens


def _head(body: ResponseBody, task: Task) -> ResponseObject:
    """The response before its output: what the body chose, with the values that were used where it chose nothing."""
    choice, text = body.tool_choice, body.text.model_dump(by_alias=True, exclude_none=True) if body.text else {}
    return ResponseObject(
        id=f"resp_{secrets.token_hex(24)}",
        created_at=int(time.time()),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        metadata=body.metadata or {},
        model=task.name,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning=body.reasoning.model_dump(exclude_none=True) if body.reasoning else {},
        safety_identifier=body.safety_identifier,
        service_tier=task.service.tier,
        store=False,
        temperature=task.sampling.temperature,
        text={"format": {"type": "text"}, **text},
        tool_choice=choice if isinstance(choice, str) else choice.model_dump(exclude_none=True) if choice else "auto",
        tools=[_shown_tool(tool) for tool in body.tools or ()],
        top_logprobs=body.top_logprobs or 0,
        top_p=task.sampling.top_p,
        truncation=body.truncation or "disabled",
        user=body.user,
    )


def _shown_tool(tool: ResponseTool) -> dict[str, Any]:
    required = {"parameters": tool.parameters, "strict": tool.strict} if tool.type == "function" else {}
    return {**tool.model_dump(exclude_none=True), **required}
