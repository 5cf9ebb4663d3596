"""The routes under /api/ that clients of Ollama look for: chat, generate, and what models there are."""

import hashlib
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from weft.server.errors import UnsupportedParameterError
from weft.server.generate.pipeline import respond
from weft.server.http.context import ServerContext, get_context
from weft.server.model.served_model import ServedModel
from weft.server.render.ollama import FRAMING, OllamaRenderer, time_text
from weft.server.request.chat_task import chat_task
from weft.server.request.completion_task import completion_task
from weft.server.request.fim import fill_in
from weft.server.request.ollama_body import (
    REFUSED_IN_OLLAMA_CHAT,
    REFUSED_IN_OLLAMA_GENERATE,
    RENAMED,
    chat_of,
    chat_of_prompt,
    completion_of,
)
from weft.server.request.validation import renamed, renaming
from weft.server.schemas.ollama import (
    MessageMember,
    OllamaAnswer,
    OllamaBody,
    OllamaChatBody,
    OllamaGenerateBody,
    ShowBody,
)
from weft.server.task.body import BodyRoute
from weft.server.task.task import Task

API_VERSION = "0.12.0"
"""The version of Ollama whose routes these are. Editors refuse older ones, so it is not Weft's own."""

router = APIRouter()
bodies = APIRouter(route_class=BodyRoute)

Context = Annotated[ServerContext, Depends(get_context)]


@bodies.post("/api/chat")
async def chat(body: OllamaChatBody, request: Request, context: Context) -> Response:
    """Answer a conversation, in JSON lines or whole."""
    model = await context.check_model(request, body.model)
    if not body.messages:
        return _loaded(body, model, message=MessageMember())
    with renaming(RENAMED):
        size, max_len = len(await request.body()), model.engine_info.max_model_len
        made = await context.workers.run_light(size, chat_of, body, max_len)
        task = await chat_task(made, request, context, sent=body, refused=REFUSED_IN_OLLAMA_CHAT)
        return await _respond(task, request, context, is_chat=True)


@bodies.post("/api/generate")
async def generate(body: OllamaGenerateBody, request: Request, context: Context) -> Response:
    """Answer a prompt, or continue it as it is, in JSON lines or whole."""
    model = await context.check_model(request, body.model)
    if not body.prompt and not body.suffix:
        return _loaded(body, model, response="")
    with renaming(RENAMED):
        max_len, refused = model.engine_info.max_model_len, REFUSED_IN_OLLAMA_GENERATE
        if body.raw or body.suffix:
            plain = completion_of(body, max_len)
            task = await completion_task(plain, request, context, sent=body, refused=refused, is_bounded=False)
        else:
            task = await chat_task(chat_of_prompt(body, max_len), request, context, sent=body, refused=refused)
        return await _respond(task, request, context, is_chat=False)


async def _respond(task: Task, request: Request, context: ServerContext, *, is_chat: bool) -> Response:
    ignored = [renamed(name, RENAMED) for name in task.ignored]
    task = replace(task, ignored=ignored, fits_context=True)
    return await respond(task, request, context, partial(OllamaRenderer, task, is_chat=is_chat), FRAMING)


def _loaded(body: OllamaBody, model: ServedModel, **empty: Any) -> Response:
    """The answer to a body that asks for nothing: clients load a model so, or unload it, which has no effect here."""
    reason = "unload" if body.keep_alive == 0 else "load"
    name = body.model or model.name
    return _json(OllamaAnswer(model=name, created_at=time_text(), done=True, done_reason=reason, **empty))


@router.get("/api/tags")
async def list_models(context: Context) -> Response:
    """Every model under each of its names."""
    await context.meet_engines()
    return _json({"models": [_card(name, model, context) for name, model in context.models.items()]})


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
    return _json({"models": running})


@bodies.post("/api/show")
async def show(body: ShowBody, request: Request, context: Context) -> Response:
    """What one model is and can do."""
    model = context.find_model(request, body.model or body.name)
    if model.engine_client.info is None:  # what is known already needs no load
        await model.engine_client.load()
    info = model.engine_info
    return _json(
        {
            "modelfile": "",
            "parameters": "",
            "template": model.tokenizer.template_source(False),
            "details": _details(model),
            "model_info": {
                "general.architecture": info.architecture,
                f"{info.architecture}.context_length": info.max_model_len,
            },
            "capabilities": _capabilities(model),
            "modified_at": time_text(context.created),
        }
    )


@router.get("/api/version")
async def version() -> Response:
    """The version of the API."""
    return _json({"version": API_VERSION})


def _card(name: str, model: ServedModel, context: ServerContext) -> dict[str, Any]:
    digest = hashlib.sha256(model.name.encode("utf-8", "replace")).hexdigest()
    return {
        "name": name,
        "model": name,
        "modified_at": time_text(context.created),
        "size": 0,  # of a file, which there is none of
        "digest": digest,
        "details": _details(model),
    }


def _details(model: ServedModel) -> dict[str, Any]:
    info = model.engine_client.info
    family = info.architecture if info else ""
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": info.dtype if info else "",
    }


def _capabilities(model: ServedModel) -> list[str]:
    if model.engine_info.task != "generate":
        return ["embedding"] if model.engine_info.task == "embed" else []
    found = ["completion"]
    if model.formats.tools is not None:
        found.append("tools")
    if model.formats.reasoning_ids is not None:
        found.append("thinking")
    try:
        fill_in(model.tokenizer)
    except UnsupportedParameterError:
        return found
    return [*found, "insert"]


def _json(answer: Any) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")


router.include_router(bodies)
