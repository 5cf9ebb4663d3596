"""The routes under /api/ in Ollama's shape: chat, generate, what models there are, and the vectors of texts.

Answers are a JSON object, or one a line. Calls are written whole, as Ollama writes them.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from weft.engine.wire.params import Pooling
from weft.server.apis.ollama import body as wire
from weft.server.apis.ollama.library import card, cards_of_library, details, served_facts, shown_of_library
from weft.server.apis.openai.chat import chat_task
from weft.server.apis.openai.completions import completion_task
from weft.server.apis.openai.pages import json_answer
from weft.server.apis.openai.render import FINISH_WORDS
from weft.server.errors import ApiError, UnsupportedParameterError
from weft.server.generate.events import CallClosed, End, Event, Reasoning, Report, Text, WholeChoice
from weft.server.generate.pipeline import respond
from weft.server.generate.vectors import VectorCall, Vectors, answer, check_dimensions, values_of
from weft.server.http.context import Context, ServerContext
from weft.server.http.metrics import Stopwatch
from weft.server.http.middleware import ollama_error
from weft.server.library.contents import Facts
from weft.server.models.served_model import ServedModel
from weft.server.task.body import AnyTypeRoute
from weft.server.task.fill_in import fill_in
from weft.server.task.task import Task
from weft.server.task.validation import renamed, renaming, require_task
from weft.server.task.vectors import InputEncoder, VectorBody, as_list, prompted


class OllamaRenderer:
    """Writes one answer; does no I/O. Only `stream` mutates it: it counts calls, and keeps the end."""

    def __init__(self, task: Task, report: Report, *, is_chat: bool) -> None:
        """Prepare to write an answer to /api/chat, or else to /api/generate; writes nothing yet."""
        self._report = report
        self._model = task.name
        self._is_chat = is_chat
        self._watch = Stopwatch()
        self._num_calls = 0
        self._end: End | None = None

    def stream(self, index: int, events: Sequence[Event]) -> bytes:
        """A line for each event that has something to show."""
        self._watch.note_event()
        return b"".join(map(self._written, events))

    def stream_end(self) -> bytes:
        """The line that ends the answer."""
        assert self._end is not None, "every choice ends"
        return self._line(self._done(self._answer("", "", []), self._end))

    def stream_error(self, error: ApiError) -> bytes:
        """The error as the last line."""
        return ollama_error(error) + b"\n"

    def whole(self, choices: Sequence[WholeChoice]) -> bytes:
        """The whole plain answer."""
        (choice,) = choices
        calls = [self._call(call) for call in choice.calls]
        return msgspec.json.encode(self._done(self._answer(choice.text, choice.reasoning, calls), choice.end))

    def _written(self, event: Event) -> bytes:
        match event:
            case Text() if event.text:
                return self._line(self._answer(event.text, "", []))
            case Reasoning():
                return self._line(self._answer("", event.text, []))
            case CallClosed():
                return self._line(self._answer("", "", [self._call(event)]))
            case End():
                self._end = event
        return b""

    def _answer(self, text: str, thinking: str, calls: list[wire.ToolCallMember]) -> wire.OllamaAnswer:
        answer = wire.OllamaAnswer(model=self._model, created_at=wire.time_text())
        shown: Any = answer
        if self._is_chat:
            shown = answer.message = wire.MessageMember(text)
        else:
            answer.response = text
        if thinking:
            shown.thinking = thinking
        if calls:
            shown.tool_calls = calls
        return answer

    def _call(self, call: CallClosed) -> wire.ToolCallMember:
        try:
            arguments = msgspec.json.decode(call.arguments, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError):
            arguments = {}  # the output ended within it
        self._num_calls += 1
        return wire.ToolCallMember(wire.ToolCallFunction(call.name, arguments, self._num_calls - 1))

    def _done(self, answer: wire.OllamaAnswer, end: End) -> wire.OllamaAnswer:
        counts = self._report.counts()
        prompt_ns, output_ns = (int(seconds * 1e9) for seconds in self._watch.read())
        answer.done, answer.done_reason = True, FINISH_WORDS[end.reason]
        answer.total_duration, answer.load_duration = prompt_ns + output_ns, 0
        answer.prompt_eval_count, answer.prompt_eval_duration = counts.prompt_tokens, prompt_ns
        answer.eval_count, answer.eval_duration = counts.output_tokens, output_ns
        return answer

    def _line(self, answer: wire.OllamaAnswer) -> bytes:
        return msgspec.json.encode(answer) + b"\n"


API_VERSION = "0.12.0"
"""The version of Ollama whose routes these are. Editors refuse older ones, so it is not Weft's own."""

router = APIRouter()
body_router = APIRouter(route_class=AnyTypeRoute)


@body_router.post("/api/chat")
async def chat(body: wire.OllamaChatBody, request: Request, context: Context) -> Response:
    """Answer a conversation, in JSON lines or whole."""
    model = await context.check_model(request, body.model)
    if not body.messages:
        return _loaded(body, model, message=wire.MessageMember())
    with renaming(wire.RENAMED):
        size, max_len = len(await request.body()), model.engine_info.max_model_len
        wire.check_context(body, max_len, strict=context.settings.strict_params)
        made = await context.workers.run_light(size, wire.chat_of, body, model.defaults)
        task = await chat_task(made, request, context, sent=body, refused=wire.REFUSED_IN_OLLAMA_CHAT)
        return await _respond(task, request, context, wire.cut_options(body, max_len), is_chat=True)


@body_router.post("/api/generate")
async def generate(body: wire.OllamaGenerateBody, request: Request, context: Context) -> Response:
    """Answer a prompt, or continue it as it is, in JSON lines or whole."""
    model = await context.check_model(request, body.model)
    if not (body.prompt or body.suffix or body.images):
        return _loaded(body, model, response="")
    with renaming(wire.RENAMED):
        max_len, refused = model.engine_info.max_model_len, wire.REFUSED_IN_OLLAMA_GENERATE
        wire.check_context(body, max_len, strict=context.settings.strict_params)
        if body.raw or body.suffix:
            plain = wire.completion_of(body, model.defaults)
            task = await completion_task(plain, request, context, sent=body, refused=refused, is_bounded=False)
        else:
            chat = wire.chat_of_prompt(body, model.defaults)
            task = await chat_task(chat, request, context, sent=body, refused=refused)
        return await _respond(task, request, context, wire.cut_options(body, max_len), is_chat=False)


async def _respond(
    task: Task, request: Request, context: ServerContext, cut: Sequence[str], *, is_chat: bool
) -> Response:
    task = replace(task, ignored=[*cut, *(renamed(name, wire.RENAMED) for name in task.ignored)], names=wire.RENAMED)
    return await respond(task, request, context, partial(OllamaRenderer, task, is_chat=is_chat), wire.FRAMING)


def _loaded(body: wire.OllamaBody, model: ServedModel, **empty: Any) -> Response:
    """The answer to a body that asks for nothing: clients load a model so, or unload it, which has no effect here."""
    reason = "unload" if body.keep_alive == 0 else "load"
    name = body.model or model.name
    value = wire.OllamaAnswer(model=name, created_at=wire.time_text(), done=True, done_reason=reason, **empty)
    return json_answer(value)


@router.get("/api/tags")
async def list_models(context: Context) -> Response:
    """Every model under each of its names; then what is in the library beside them, where clients may change that."""
    await context.meet_engines()
    served = [_card(name, model, context) for name, model in context.models.items()]
    return json_answer({"models": served + await cards_of_library(context)})


@router.get("/api/ps")
async def list_running(context: Context) -> Response:
    """Those of them that are loaded."""
    await context.meet_engines()
    running = []
    for name, model in context.models.items():
        info = model.engine_client.info
        if info is not None and context.is_loaded(name):
            more = {"expires_at": "9999-12-31T23:59:59Z", "size_vram": 0, "context_length": info.max_model_len}
            running.append({**_card(name, model, context), **more})
    return json_answer({"models": running})


@body_router.post("/api/show")
async def show(body: wire.ShowBody, request: Request, context: Context) -> Response:
    """What one model is and can do; of one in the library that is not served, what its files are."""
    if kept := await shown_of_library(context, body.model or body.name):
        return json_answer(kept)
    model = context.find_model(request, body.model or body.name)
    if model.engine_client.info is None:  # what is known already needs no load
        await model.engine_client.load()
    info = model.engine_info
    return json_answer(
        {
            "modelfile": "",
            "parameters": "",
            "template": model.tokenizer.template_source(False),
            "details": details(_facts(model, context), info.architecture),
            "model_info": {
                "general.architecture": info.architecture,
                f"{info.architecture}.context_length": info.max_model_len,
            },
            "capabilities": _capabilities(model),
            "modified_at": wire.time_text(context.created),
        }
    )


@router.get("/api/version")
async def version() -> Response:
    """The version of the API."""
    return json_answer({"version": API_VERSION})


def _card(name: str, model: ServedModel, context: ServerContext) -> dict[str, Any]:
    return card(name, _facts(model, context), _family(model))


def _facts(model: ServedModel, context: ServerContext) -> Facts:
    return served_facts(context.settings.fleet[model.name].model)


def _family(model: ServedModel) -> str:
    info = model.engine_client.info
    return info.architecture if info else ""


def _capabilities(model: ServedModel) -> list[str]:
    if model.engine_info.task != "generate":
        return ["embedding"] if model.engine_info.task == "embed" else []
    found = ["completion"] if model.engine_info.picture_token is None else ["completion", "vision"]
    if model.formats.tools is not None:
        found.append("tools")
    if model.formats.reasoning_ids is not None:
        found.append("thinking")
    try:
        fill_in(model.tokenizer)
    except UnsupportedParameterError:
        return found
    return [*found, "insert"]


_RENAMED_IN_VECTORS = {r"^truncate_prompt_tokens": "truncate"}


@body_router.post("/api/embed")
async def embed(body: wire.OllamaEmbedBody, request: Request, context: Context) -> Response:
    """The vector of each text, of length 1, as Ollama gives it."""
    start = time.perf_counter_ns()
    model = await context.check_model(request, body.model)
    require_task(model, "embed")
    pooling = Pooling(dimensions=check_dimensions(body.dimensions, model), is_finished=True)
    texts, may_cut = body.input or [], body.truncate is not False
    vectors = await _vectors(body, texts, pooling, request, context, model, may_cut=may_cut)

    def build() -> wire.OllamaEmbedded:
        values = [values_of(output) for output in vectors.outputs]
        lasted = time.perf_counter_ns() - start
        return wire.OllamaEmbedded(vectors.name, values, lasted, 0, vectors.usage.prompt_tokens)

    return await answer(context, vectors, build)


@body_router.post("/api/embeddings")
async def embeddings(body: wire.OllamaEmbeddingsBody, request: Request, context: Context) -> Response:
    """The vector of one text, as the model makes it."""
    model = await context.check_model(request, body.model)
    require_task(model, "embed")
    vectors = await _vectors(body, body.prompt or [], Pooling(), request, context, model, may_cut=True)
    values = [value for output in vectors.outputs for value in values_of(output)]
    return await answer(context, vectors, lambda: wire.OllamaEmbedding(values))


async def _vectors(
    sent: wire.OllamaEmbedBody | wire.OllamaEmbeddingsBody,
    texts: str | list[str],
    pooling: Pooling,
    request: Request,
    context: ServerContext,
    model: ServedModel,
    *,
    may_cut: bool,
) -> Vectors:
    """The vectors of texts, of which there may be none. Texts that are too long are cut if they may be."""
    body = VectorBody(model=sent.model, truncate_prompt_tokens=-1 if may_cut else None)
    with renaming(_RENAMED_IN_VECTORS):
        inputs = prompted(as_list(texts), model, None, None) if texts else []
        encoder = InputEncoder(model, body, "input" if isinstance(sent, wire.OllamaEmbedBody) else "prompt")
        return await VectorCall(body, request, context, model, encoder, sent).vectors(inputs, pooling, "embd")


router.include_router(body_router)
