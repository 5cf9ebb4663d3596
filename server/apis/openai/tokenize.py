"""Token ids without generating: POST /tokenize, /detokenize and the routes that end with /render, the same as vLLM's.

The routes that end with /render give the ids that the engine would get. Routers ask for them, to find the server that
has the longest beginning of a prompt in its cache.
"""

from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from weft.server.apis.openai.chat import chat_task
from weft.server.apis.openai.completions import completion_task
from weft.server.apis.openai.pages import json_answer
from weft.server.errors import InvalidRequestError
from weft.server.generate.prompts import PromptEncoder, encode_chat
from weft.server.http.context import Context, ServerContext
from weft.server.http.limits import Workers
from weft.server.models.served_model import ServedModel
from weft.server.task import validation
from weft.server.task.bodies import ChatCompletionBody, CompletionBody, Message, Messages
from weft.server.task.body import BodyRoute
from weft.server.task.messages import template_messages
from weft.server.task.parts import Spans
from weft.server.task.pictures import read_pictures
from weft.server.task.schema import Int, Items, Text, ToolDefinition, WireModel
from weft.server.task.task import Chat, Task
from weft.server.task.template_options import checked_kwargs, prompt_end
from weft.server.task.tool_use import tool_use
from weft.server.text.text_tokenizer import TextTooLongError, TokenRoom

REFUSED_IN_TOKENIZE: validation.Refused = {"chat_template": validation.NOTHING}

MIN_COUNTED_TOKENS = 1 << 16
"""A text may have four times as many tokens as the context, and never fewer than this."""


class TokenizeBody(WireModel):
    """The body of POST /tokenize: a prompt or messages, not both."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    tools: Items[ToolDefinition] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None


class TokenizeAnswer(msgspec.Struct):
    """The token ids, and the text of each if requested."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeBody(WireModel):
    """The body of POST /detokenize: token ids."""

    model: Text | None = None
    tokens: Items[Int]


class DetokenizeAnswer(msgspec.Struct):
    """The text of the ids, control tokens included."""

    prompt: str


class RenderedPrompt(msgspec.Struct):
    """A prompt as the engine gets it."""

    request_id: str
    model: str
    token_ids: list[int]


router = APIRouter(route_class=BodyRoute)


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, request: Request, context: Context) -> Response:
    """Count and return the tokens of a prompt or of messages."""
    size, workers = len(await request.body()), context.workers
    ignored = await workers.run_light(
        size, validation.ignored_fields, body, REFUSED_IN_TOKENIZE, strict=context.settings.strict_params
    )
    model = await context.check_model(request, body.model)
    tokenizer, room = model.tokenizer, _room(model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("send either prompt or messages", param="prompt")
    try:
        if body.messages is not None:
            token_ids = await _chat_ids(body, body.messages, model, request, context, room)
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
    return json_answer(answer, validation.ignored_header(ignored))


async def _chat_ids(
    body: TokenizeBody,
    messages: list[Message],
    model: ServedModel,
    request: Request,
    context: ServerContext,
    room: TokenRoom,
) -> list[int]:
    workers, size = context.workers, len(await request.body())
    if body.add_special_tokens:
        raise InvalidRequestError(
            "add_special_tokens is for prompt; a chat template adds its own", param="add_special_tokens"
        )
    if not model.tokenizer.template_source(has_tools=bool(body.tools)):
        validation.require_task(model, "generate")  # no model for vectors needs a template
    chat = ChatCompletionBody(messages=messages, tools=body.tools)
    use, _ = await workers.run_light(size, tool_use, chat, strict=False)
    variables = {**checked_kwargs(body.chat_template_kwargs), **({"tools": use.shown} if use else {})}
    end = prompt_end(body.add_generation_prompt, body.continue_final_message, variables)
    spans = Spans(beyond="read")
    shown = await workers.run_light(size, template_messages, messages, model.formats.tools, spans)
    await read_pictures(spans, model, request, context)
    prompt, _ = await encode_chat(model.tokenizer, Chat(shown, end, spans=spans), room, workers, size)
    return prompt.token_ids


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, request: Request, context: Context) -> Response:
    """Return the text of token ids."""
    ignored = validation.ignored_fields(body, {}, strict=context.settings.strict_params)
    model = await context.check_model(request, body.model)
    workers, size = context.workers, len(body.tokens)
    validation.check_range("the number of tokens", size, 0, _room(model).num_tokens, param="tokens")
    await workers.run_light(size, validation.check_token_ids, body.tokens, model.engine_info.vocab_size, "tokens")
    text = await workers.run(size, model.tokenizer.decode, body.tokens, skip_special_tokens=False)
    return json_answer(DetokenizeAnswer(text), validation.ignored_header(ignored))


async def count_chat_tokens(chat: Chat, model: ServedModel, size: int, workers: Workers) -> int:
    """The number of tokens in the prompt of messages; `size` is that of their body.

    Raises:
        InvalidRequestError: There are far more than the context holds, or the template refuses the messages.
    """
    room = _room(model)
    try:
        prompt, _ = await encode_chat(model.tokenizer, chat, room, workers, size)
    except TextTooLongError as exc:
        message = f"{chat.param} must have at most {room.num_tokens} tokens, got at least {exc.num_tokens}"
        raise InvalidRequestError(message, param=chat.param) from None
    return len(prompt.token_ids)


def _room(model: ServedModel) -> TokenRoom:
    return TokenRoom(max(4 * model.engine_info.max_model_len, MIN_COUNTED_TOKENS))


@router.post("/v1/chat/completions/render")
async def render_chat_completion(body: ChatCompletionBody, request: Request, context: Context) -> Response:
    """The prompt of a conversation."""
    task = await chat_task(body, request, context)
    (prompt,) = await _rendered(task, request, context)
    return json_answer(prompt, validation.ignored_header(task.ignored))


@router.post("/v1/completions/render")
async def render_completion(body: CompletionBody, request: Request, context: Context) -> Response:
    """Every prompt of a completion, in a list."""
    task = await completion_task(body, request, context)
    return json_answer(await _rendered(task, request, context), validation.ignored_header(task.ignored))


async def _rendered(task: Task, request: Request, context: ServerContext) -> list[RenderedPrompt]:
    prompts, _ = await PromptEncoder(task, context.workers).prompts()
    return [RenderedPrompt(request.state.request_id, task.model.name, prompt.token_ids) for prompt in prompts]
