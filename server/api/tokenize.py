"""POST /tokenize and /detokenize: convert between text and token ids, without generating."""

from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from weft.server.errors import InvalidRequestError
from weft.server.generate.prompts import encode_chat
from weft.server.http.context import ServerContext, get_context
from weft.server.http.workers import Workers
from weft.server.model.served_model import ServedModel
from weft.server.request.fields import REFUSED_IN_TOKENIZE, ignored_fields, ignored_header
from weft.server.request.messages import template_messages
from weft.server.request.template_options import checked_kwargs, prompt_end
from weft.server.request.validation import check_range, check_token_ids
from weft.server.schemas.chat_completions import ChatCompletionBody, Message
from weft.server.schemas.tokenize import DetokenizeAnswer, DetokenizeBody, TokenizeAnswer, TokenizeBody
from weft.server.task.body import BodyRoute
from weft.server.task.task import Chat, Task
from weft.server.task.tool_use import tool_use
from weft.server.text.long_text import Room, TextTooLongError

MIN_COUNTED_TOKENS = 1 << 16
"""A text may have four times as many tokens as the context, and never fewer than this."""

router = APIRouter(route_class=BodyRoute)


@router.post("/tokenize")
async def tokenize(
    body: TokenizeBody, request: Request, context: Annotated[ServerContext, Depends(get_context)]
) -> Response:
    """Count and return the tokens of a prompt or of messages."""
    size, workers = len(await request.body()), context.workers
    ignored = await workers.run_light(
        size, ignored_fields, body, REFUSED_IN_TOKENIZE, strict=context.settings.strict_params
    )
    model = await context.check_model(request, body.model)
    tokenizer, room = model.tokenizer, _room(model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("send either prompt or messages", param="prompt")
    try:
        if body.messages is not None:
            token_ids = await _chat_ids(body, body.messages, model, workers, room, size)
        else:
            prompt, is_special = body.prompt or "", body.add_special_tokens is not False
            token_ids = await workers.run(len(prompt), tokenizer.encode, prompt, is_special, room)
    except TextTooLongError as exc:
        param = "prompt" if body.messages is None else "messages"
        message = f"{param} must have at most {room.num_tokens} tokens, got at least {exc.num_tokens}"
        raise InvalidRequestError(message, param=param) from None

    def token_strs() -> list[str]:
        return [tokenizer.token_text(token_id) for token_id in token_ids]

    texts = await workers.run(len(token_ids), token_strs) if body.return_token_strs else None
    answer = TokenizeAnswer(len(token_ids), model.engine_info.max_model_len, token_ids, texts)
    return Response(msgspec.json.encode(answer), headers=ignored_header(ignored), media_type="application/json")


async def count_chat_tokens(task: Task, workers: Workers) -> int:
    """The number of tokens in the prompt of a chat task.

    Raises:
        InvalidRequestError: There are far more than the context holds, or the template refuses the messages.
    """
    assert isinstance(task.input, Chat)
    room = _room(task.model)
    try:
        token_ids, _ = await workers.run(task.size, encode_chat, task.model.tokenizer, task.input, room)
    except TextTooLongError as exc:
        message = f"messages must have at most {room.num_tokens} tokens, got at least {exc.num_tokens}"
        raise InvalidRequestError(message, param="messages") from None
    return len(token_ids)


def _room(model: ServedModel) -> Room:
    return Room(max(4 * model.engine_info.max_model_len, MIN_COUNTED_TOKENS))


async def _chat_ids(
    body: TokenizeBody, messages: list[Message], model: ServedModel, workers: Workers, room: Room, size: int
) -> list[int]:
    if body.add_special_tokens:
        raise InvalidRequestError(
            "add_special_tokens is for prompt; a chat template adds its own", param="add_special_tokens"
        )
    chat = ChatCompletionBody(messages=messages, tools=body.tools)
    use = await workers.run_light(size, tool_use, chat)
    variables = {**checked_kwargs(body.chat_template_kwargs), **({"tools": use.shown} if use else {})}
    end = prompt_end(body.add_generation_prompt, body.continue_final_message, variables)
    shown = await workers.run_light(size, template_messages, messages, model.formats.tools)
    token_ids, _ = await workers.run(size, encode_chat, model.tokenizer, Chat(shown, end), room)
    return token_ids


@router.post("/detokenize")
async def detokenize(
    body: DetokenizeBody, request: Request, context: Annotated[ServerContext, Depends(get_context)]
) -> Response:
    """Return the text of token ids."""
    ignored = ignored_fields(body, {}, strict=context.settings.strict_params)
    model = await context.check_model(request, body.model)
    workers, size = context.workers, len(body.tokens)
    check_range("the number of tokens", size, 0, _room(model).num_tokens, param="tokens")
    await workers.run_light(size, check_token_ids, body.tokens, model.engine_info.vocab_size, "tokens")
    text = await workers.run(size, model.tokenizer.decode, body.tokens, skip_special_tokens=False)
    answer = msgspec.json.encode(DetokenizeAnswer(text))
    return Response(answer, headers=ignored_header(ignored), media_type="application/json")
