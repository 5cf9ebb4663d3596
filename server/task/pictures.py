"""Has the pictures of a conversation read, before its prompt is made: found, decoded, and made what the model sees.

All bounds are checked before any work that they bound. An error names the part, the bound and the value.
"""

from functools import partial
from typing import Final

from starlette.requests import Request

from weft.engine.wire.pictures import MAX_REQUEST_BYTES
from weft.server.errors import InvalidRequestError, NotFoundError, UnsupportedValueError, shown
from weft.server.http.auth import tenant_of
from weft.server.http.context import ServerContext
from weft.server.models.served_model import ServedModel
from weft.server.pictures.fetch import fetch
from weft.server.pictures.source import Place, check_size, decoded
from weft.server.store.contents import open_content
from weft.server.store.transaction import Row
from weft.server.task.parts import Span, Spans

MAX_PICTURES: Final = 100
"""Of a request."""


async def read_pictures(spans: Spans, model: ServedModel, request: Request, context: ServerContext) -> None:
    """Read the pictures of a conversation that are not read yet; most have none.

    Raises:
        UnsupportedValueError: The model sees no pictures, or one may not be fetched.
        InvalidRequestError: One is damaged or exceeds a bound, or there are too many.
        NotFoundError: A file is not there.
    """
    unread = spans.unread
    if not unread:
        return
    first, token_id = unread[0][1], model.engine_info.picture_token
    if token_id is None or model.pictures is None:
        message = f"{first.at}: the model does not take {spans.noun} of type {shown(first.type)}"
        raise UnsupportedValueError(message, param=first.at)
    if len(unread) > MAX_PICTURES:
        last = unread[MAX_PICTURES][1].at
        raise InvalidRequestError(
            f"{last}: a request may hold at most {MAX_PICTURES} pictures, got {len(unread)}", param=last
        )
    places, num_bytes = [source.place() for _, source in unread], 0
    for (number, source), place in zip(unread, places, strict=True):
        content = await _content(place, request, context)
        read = await model.pictures.read(content, token_id, tenant_of(request))
        made, sign, picture = read.made, read.sign, read.picture
        if picture is None:
            raise InvalidRequestError(f"{source.at}: {made.fault}", param=source.at)
        num_bytes += picture.num_bytes
        if num_bytes > MAX_REQUEST_BYTES:
            bound = f"the pictures of a request may take at most {MAX_REQUEST_BYTES} bytes as the model reads them"
            raise InvalidRequestError(f"{source.at}: {bound}, got {num_bytes} up to here", param=source.at)
        sign_id = model.tokenizer.added_id(sign)
        if sign_id is None or not model.tokenizer.is_special(sign_id):  # or a caller's text could be a picture's place
            fault = f"the model's tokenizer has no control token {shown(sign)}, which stands for pictures"
            raise UnsupportedValueError(f"{source.at}: {fault}", param=source.at)
        spans.put(number, Span(made.placeholder, made.num_tokens, made.digest, made.text, sign, picture))


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
    return await context.store.run(partial(_read, context, row))


def _read(context: ServerContext, row: Row) -> bytes:
    with open_content(context.store, row) as file:
        return file.read()
