"""Parses the bytes of a body into its schema's model: bounded first, in a thread if long.

A C function that works on a long text keeps all other threads waiting. So a body is bounded by its content too, not by
its bytes alone. Texts may fill it. Numbers, lists and objects are counted before it is parsed. If the client
disconnects, the request is dropped. Work that a thread has begun still runs to its end in that thread.
"""

import asyncio
import json
from collections.abc import Callable, Coroutine
from math import isfinite
from typing import Any, TypeVar

from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope

from weft.server import errors
from weft.server.http.limits import Workers
from weft.server.task.schema import MAX_ITEMS
from weft.server.task.validation import as_invalid_request, check_utf8

MAX_PARTS = 2**17
"""Most texts, lists and objects in a body; names of members count as texts."""

_SLICE_BYTES = 1 << 18

CLIENT_CLOSED = 499
"""Status if the client has disconnected; nobody reads it."""

T = TypeVar("T", bound=BaseModel)


class BodyRoute(APIRoute):
    """A route whose body is decoded in this file. FastAPI gets the finished model.

    Attributes:
        takes_any_type: Read the body as JSON whatever its content type is.
    """

    takes_any_type = False

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Override FastAPI's handler: decode the body, and stop when the client disconnects."""
        handle = super().get_route_handler()
        assert self.body_field is not None, "the routes with this class have a body"
        model: type[BaseModel] = self.body_field.field_info.annotation  # type: ignore[assignment]

        async def handle_body(request: Request) -> Response:
            try:
                data = await request.body()
            except ClientDisconnect:
                return Response(status_code=CLIENT_CLOSED)
            if self.takes_any_type:
                _call_json(request)
            decoding = _DecodingRequest(request.scope, request.receive, data, model)
            return await while_wanted(request, handle(decoding)) or Response(status_code=CLIENT_CLOSED)

        return handle_body


class AnyTypeRoute(BodyRoute):
    """A route of a server whose clients send JSON under other names or none, as curl does."""

    takes_any_type = True


def _call_json(request: Request) -> None:
    """Write over the content type, unless a browser names a page that asks.

    A page of any site may send other types than JSON without a preflight. All that it cannot leave out is its origin.
    """
    if "origin" not in request.headers:
        others = [header for header in request.scope["headers"] if header[0] != b"content-type"]
        request.scope["headers"] = [*others, (b"content-type", b"application/json")]


class _DecodingRequest(Request):
    def __init__(self, scope: Scope, receive: Receive, data: bytes, model: type[BaseModel]) -> None:
        super().__init__(scope, receive)
        self._body = data
        self._model = model

    async def json(self) -> BaseModel | None:
        """Return the model. FastAPI calls this if the content type is JSON."""
        workers: Workers = self.app.state.context.workers
        return await workers.run_light(len(self._body), decode, self._model, self._body)


async def while_wanted(request: Request, work: Coroutine[Any, Any, Response]) -> Response | None:
    """Await the work; cancel it and return None if the client disconnects. The body must have been read.

    Raises:
        ShuttingDownError: The drain cancelled it.
    """

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    unanswered = request.app.state.lifecycle.unanswered
    working = asyncio.create_task(work)
    watching = asyncio.create_task(disconnected())
    unanswered.add(working)
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.cancelled():
            raise errors.ShuttingDownError("the server is shutting down and had to cut this request")
        return working.result() if working.done() else None
    finally:
        unanswered.discard(working)
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


def decode(model: type[T], data: bytes) -> T | None:
    """Parse and validate a body; None if it is JSON's null.

    Raises:
        MalformedBodyError: It is not JSON, or holds too many values.
        InvalidRequestError: It holds a lone surrogate outside a conversation, or does not match the schema.
    """
    check_amount(data)
    others: list[_NotJson] = []

    def number(text: str) -> float:
        if isfinite(value := float(text)):
            return value
        others.append(_NotJson(value))
        return others[-1]

    try:
        text = data.decode("utf-8-sig", "surrogatepass")  # no other encoding: the counts assume UTF-8
        value = json.loads(text, parse_constant=number, parse_float=number)
    except json.JSONDecodeError as exc:
        raise errors.MalformedBodyError(f"the body is not valid JSON: {exc.msg} at character {exc.pos}") from None
    except (ValueError, RecursionError) as exc:
        raise errors.MalformedBodyError(f"the body is not valid JSON: {_fault(exc)}") from None
    check_utf8(data, value, getattr(model, "spoken", ()))
    if value is None:
        return None
    if not isinstance(value, dict):
        raise errors.InvalidTypeError(f"the body: input should be a JSON object, got {errors.shown(value)}")
    if others:
        _refuse_others(value)
    try:
        return model.model_validate(value, from_attributes=True)
    except ValidationError as exc:
        raise as_invalid_request(exc.errors(include_url=False), value) from None


class _NotJson(float):
    """NaN, Infinity, 1e999. Python's parser takes them, and its writer would show them to models and tools as JSON."""


def _refuse_others(body: dict[str, Any]) -> None:
    for name, value in body.items():
        rest = [value]
        while rest:
            value = rest.pop()
            if isinstance(value, _NotJson):
                name = name[: errors.MAX_VALUE_CHARS]
                raise errors.InvalidRequestError(f"{name} must hold numbers as JSON has them, got {value}", param=name)
            rest += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _fault(exc: Exception) -> str:
    match exc:
        case UnicodeDecodeError():
            return "it is not encoded in UTF-8"
        case RecursionError():
            return "it is nested too deeply"
        case _:
            return "a number in it has too many digits"


def check_amount(data: bytes) -> None:
    """Count the values of a JSON text before it is parsed. The content of strings does not count.

    Raises:
        MalformedBodyError: There are too many.
    """
    num_items, num_parts, in_text, start = 0, 0, False, 0
    while start < len(data):
        end = start + _SLICE_BYTES
        if _ends_in_escape(data[start:end]):
            end += 1
        pieces = data[start:end].replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')
        outside = b"".join(pieces[in_text::2])
        num_items += outside.count(b",")
        num_parts += outside.count(b"[") + outside.count(b"{") + len(pieces) // 2
        if num_items > MAX_ITEMS or num_parts > MAX_PARTS:
            raise errors.MalformedBodyError(
                f"the body must hold at most {MAX_ITEMS} values, and at most {MAX_PARTS} texts, lists and objects; "
                f"got at least {num_items} and {num_parts}"
            )
        in_text ^= len(pieces) % 2 == 0
        start = end


def _ends_in_escape(data: bytes) -> bool:
    return (len(data) - len(data.rstrip(b"\\"))) % 2 == 1
