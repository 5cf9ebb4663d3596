"""Has the pictures of a conversation read, before its prompt is made: found, decoded, and made what the model sees.

All bounds are checked before any work that they bound. An error names the part, the bound and the value.
"""

from functools import partial
from typing import Final

from starlette.requests import Request

from weft.engine.wire.pictures import MAX_REQUEST_BYTES
from weft.server.errors import ContextLengthError, InvalidRequestError, NotFoundError, UnsupportedValueError, shown
from weft.server.http.auth import tenant_of
from weft.server.http.context import ServerContext
from weft.server.models.served_model import ServedModel
from weft.server.pictures.fetch import fetch
from weft.server.pictures.held import ReadPicture
from weft.server.pictures.source import Place, check_size, decoded
from weft.server.store.contents import open_content
from weft.server.store.transaction import Row
from weft.server.task.parts import Span, Spans

MAX_PICTURES: Final = 100
"""Of a request."""


async def read_pictures(
    spans: Spans, model: ServedModel, request: Request, context: ServerContext, *, is_cut: bool = False
) -> None:
    """Read the pictures of a conversation that are not read yet; most have none.

    Args:
        is_cut: Whether the beginning of the prompt is cut away where it is too long.

    Raises:
        UnsupportedValueError: The model sees no pictures, or one may not be fetched.
        InvalidRequestError: One is damaged or exceeds a bound, or there are too many.
        ContextLengthError: They have more tokens than the context.
        NotFoundError: A file is not there.
    """
    unread = spans.unread
    if not unread:
        return
    info, first, tenant = model.engine_info, unread[0][1], tenant_of(request)
    if info.picture_token is None or model.pictures is None:
        message = f"{first.at}: the model does not take {spans.noun} of type {shown(first.type)}"
        raise UnsupportedValueError(message, param=first.at)
    if spans.beyond == "leave":
        unread.reverse()
    if len(unread) > MAX_PICTURES:
        last = unread[MAX_PICTURES][1].at
        fault = f"{last}: a request may hold at most {MAX_PICTURES} pictures, got {len(unread)}"
        spans.leave(InvalidRequestError(fault, param=last))
    places, num_bytes, num_tokens = [source.place() for _, source in unread[:MAX_PICTURES]], 0, 0
    for (number, source), place in zip(unread, places, strict=False):
        async with model.pictures.files.turn(tenant):
            content = await _content(place, request, context)
            read = await model.pictures.read(content, info.picture_token, tenant, info.dtype)
            del content  # and not once the next one is there
        span = _span(read, model, source.at)
        num_bytes, num_tokens = num_bytes + read.made.num_bytes, num_tokens + span.num_tokens
        if num_bytes > MAX_REQUEST_BYTES:
            bound = f"the pictures of a request may take at most {MAX_REQUEST_BYTES} bytes as the model reads them"
            error = InvalidRequestError(f"{source.at}: {bound}, got {num_bytes} up to here", param=source.at)
            return spans.leave(error)
        if num_tokens > (most := info.max_prompt) and not is_cut and spans.beyond != "read":
            fault = f"{source.at}: the context holds at most {most} tokens, the pictures up to here have {num_tokens}"
            room = {"num_tokens": num_tokens, "max_num_tokens": most}
            return spans.leave(ContextLengthError(fault, param=source.at, **room))
        spans.put(number, span)


def _span(read: ReadPicture, model: ServedModel, at: str) -> Span:
    made, sign = read.made, read.sign
    if read.picture is None:
        raise InvalidRequestError(f"{at}: {made.fault}", param=at)
    sign_id = model.tokenizer.added_id(sign)
    if sign_id is None or not model.tokenizer.is_special(sign_id):  # or a caller's text could be a picture's place
        fault = f"the model's tokenizer has no control token {shown(sign)}, which stands for pictures"
        raise UnsupportedValueError(f"{at}: {fault}", param=at)
    return Span(made.placeholder, made.num_tokens, made.digest, made.text, sign, read.picture)


async def _content(place: Place, request: Request, context: ServerContext) -> bytes:
    if place.data is not None:
        return await context.workers.run_light(len(place.data), decoded, place.data, place.at)
    if place.url is not None:
        return await fetch(place.url, context.settings.image_hosts, place.at)
    file_id, tenant = place.file_id or "", tenant_of(request)
    row = await context.store.read(lambda transaction: transaction.get("file", file_id, tenant))
    if row is None:
        raise NotFoundError(f"{place.at}: no such file: {shown(file_id)}", param=place.at)
    check_size(row.size - 1, place.at)
    return await context.store.run(partial(_stored, context, row))


def _stored(context: ServerContext, row: Row) -> bytes:
    with open_content(context.store, row) as file:
        return file.read()
