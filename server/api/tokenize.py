"""POST /tokenize and /detokenize: text and ids, without generating."""

from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from weft.server.api.chat_completions import encode_messages
from weft.server.errors import InvalidRequestError
from weft.server.generate.respond import check_token_ids
from weft.server.http.context import ServerContext, get_context
from weft.server.request.body import BodyRoute
from weft.server.request.fields import REFUSED_IN_TOKENIZE, ignored_fields, ignored_header
from weft.server.request.params import check_range
from weft.server.request.template_options import checked_kwargs, prompt_end
from weft.server.request.tool_use import tool_use
from weft.server.schemas.chat_completions import ChatCompletionBody, Message
from weft.server.schemas.tokenize import DetokenizeAnswer, DetokenizeBody, TokenizeAnswer, TokenizeBody
from weft.server.text.long_text import Room, TextTooLongError

MIN_COUNTED_TOKENS = 1 << 16
"""So many tokens of a text are counted whatever the context, and else four times the context."""

router = APIRouter(route_class=BodyRoute)


@router.post("/tokenize")
async def tokenize(
    body: TokenizeBody, request: Request, context: Annotated[ServerContext, Depends(get_context)]
) -> Response:
    """Count and show the tokens of a prompt or of messages."""
    size, workers, tokenizer = len(await request.body()), context.workers, context.tokenizer
    ignored = await workers.run_light(
        size, ignored_fields, body, REFUSED_IN_TOKENIZE, strict=context.settings.strict_params
    )
    context.check_model(body.model)
    room = _room(context)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("send either prompt or messages", param="prompt")
    try:
        if body.messages is not None:
            token_ids = await _chat_ids(body, body.messages, context, room, size)
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
    answer = TokenizeAnswer(len(token_ids), context.engine_info.max_model_len, token_ids, texts)
    return Response(msgspec.json.encode(answer), headers=ignored_header(ignored), media_type="application/json")


def _room(context: ServerContext) -> Room:
    return Room(max(4 * context.engine_info.max_model_len, MIN_COUNTED_TOKENS))


async def _chat_ids(
    body: TokenizeBody, messages: list[Message], context: ServerContext, room: Room, size: int
) -> list[int]:
    if body.add_special_tokens:
        raise InvalidRequestError(
            "add_special_tokens is for prompt; a chat template adds its own", param="add_special_tokens"
        )
    chat = ChatCompletionBody(messages=messages, tools=body.tools)
    use = await context.workers.run_light(size, tool_use, chat)
    variables = {**checked_kwargs(body.chat_template_kwargs), **({"tools": use.shown} if use else {})}
    end = prompt_end(body.add_generation_prompt, body.continue_final_message, variables)
    return await encode_messages(context, messages, options=end, room=room, size=size)


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, context: Annotated[ServerContext, Depends(get_context)]) -> Response:
    """Show the text of token ids."""
    ignored = ignored_fields(body, {}, strict=context.settings.strict_params)
    context.check_model(body.model)
    workers, size = context.workers, len(body.tokens)
    check_range("the number of tokens", size, 0, _room(context).num_tokens, param="tokens")
    await workers.run_light(size, check_token_ids, body.tokens, context.engine_info, "tokens")
    text = await workers.run(size, context.tokenizer.decode, body.tokens, skip_special_tokens=False)
    answer = msgspec.json.encode(DetokenizeAnswer(text))
    return Response(answer, headers=ignored_header(ignored), media_type="application/json")
