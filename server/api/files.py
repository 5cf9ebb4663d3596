"""/v1/files: files of an API key. A file is acknowledged once it is on the disk."""

import contextlib
import time
from functools import partial
from typing import Annotated, get_args

from fastapi import APIRouter, Depends
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response

from weft.server.errors import (
    InvalidRequestError,
    NotFoundError,
    StorageError,
    StorageFullError,
    UnknownParameterError,
    shown,
)
from weft.server.http.auth import tenant_of
from weft.server.http.context import ServerContext, get_context
from weft.server.request.fields import ignored_header
from weft.server.request.form import read_form
from weft.server.request.page import json_answer, list_answer, read_page
from weft.server.request.validation import check_range
from weft.server.schemas.stored import Purpose
from weft.server.store.files import content_path, file_row, living, new_id, remove_contents, sweep
from weft.server.store.transaction import Row
from weft.server.task.body import CLIENT_CLOSED

BATCH_FILE_S = 30 * 86400
"""A file for a batch expires after so long, if nothing else was asked."""
_FIELDS = {"purpose", "expires_after[anchor]", "expires_after[seconds]"}
Context = Annotated[ServerContext, Depends(get_context)]

router = APIRouter()


@router.post("/v1/files")
async def create_file(request: Request, context: Context) -> Response:
    """Store a file, sent as a multipart form."""
    id, store = new_id("file-"), context.store
    with contextlib.suppress(StorageError):  # the next one tries again
        await store.run(partial(sweep, store, await store.read(living)))
    try:
        form = await read_form(request, store, id, "file", context.settings.max_file_bytes)
    except ClientDisconnect:
        return Response(status_code=CLIENT_CLOSED)
    unknown = sorted(form.fields.keys() - _FIELDS)
    try:
        if unknown and context.settings.strict_params:
            raise UnknownParameterError(f"unknown parameter: {shown(unknown[0])}", param=unknown[0])
        purpose = form.fields.get("purpose", "")
        if purpose not in get_args(Purpose):
            wanted = " or ".join(get_args(Purpose))
            raise InvalidRequestError(f"purpose must be {wanted}, got {shown(purpose)}", param="purpose")
        expires_at = expiry(purpose, _expires_after(form.fields))
        fields = {"bytes": form.content.size, "filename": form.filename, "purpose": purpose, "expires_at": expires_at}
        row = file_row(id, tenant_of(request), **fields)
        await store.write(lambda transaction: transaction.put(row))
    except BaseException:
        form.content.discard()
        raise
    return Response(row.data, headers=ignored_header(unknown), media_type="application/json")


@router.get("/v1/files")
async def list_files(request: Request, context: Context) -> Response:
    """The files of this API key."""
    page = read_page(request, max_limit=10_000, default_limit=10_000)
    purpose, tenant = request.query_params.get("purpose"), tenant_of(request)
    rows = await context.store.read(
        lambda transaction: transaction.page(
            "file",
            tenant,
            member=("purpose", purpose) if purpose else None,
            after=page.after,
            limit=page.limit + 1,
            order=page.order,
        )
    )
    return list_answer(rows, page)


@router.get("/v1/files/{file_id}")
async def retrieve_file(file_id: str, request: Request, context: Context) -> Response:
    """One file."""
    return Response((await find_file(file_id, request, context)).data, media_type="application/json")


@router.get("/v1/files/{file_id}/content")
async def file_content(file_id: str, request: Request, context: Context) -> Response:
    """The bytes of a file."""
    path = content_path(context.store, (await find_file(file_id, request, context)).id)
    if not await context.store.run(path.is_file):
        raise NotFoundError(f"the content of the file is gone: {shown(file_id)}", param="file_id")
    return FileResponse(path, media_type="application/octet-stream")


@router.delete("/v1/files/{file_id}")
async def delete_file(file_id: str, request: Request, context: Context) -> Response:
    """Remove a file."""
    row = await find_file(file_id, request, context)
    remove = partial(context.store.write, lambda transaction: transaction.delete("file", row.id, row.tenant))
    try:
        await remove()
    except StorageFullError:  # its content gives back the room that removing the row needs
        await remove_contents(context.store, [row.id])
        await remove()
    await remove_contents(context.store, [row.id])
    return json_answer({"id": file_id, "object": "file", "deleted": True})


async def find_file(file_id: str, request: Request, context: ServerContext, param: str = "file_id") -> Row:
    """The row of a file. Raises NotFoundError if this API key has no such file."""
    tenant = tenant_of(request)
    row = await context.store.read(lambda transaction: transaction.get("file", file_id, tenant))
    if row is None:
        raise NotFoundError(f"no such file: {shown(file_id)}", param=param)
    return row


def expiry(purpose: str, seconds: int | None) -> int | None:
    """When a file goes, in seconds since 1970; None: never."""
    if seconds is None and purpose != "batch":
        return None
    return int(time.time()) + (BATCH_FILE_S if seconds is None else seconds)


def _expires_after(fields: dict[str, str]) -> int | None:
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        name = "expires_after.anchor"
        raise InvalidRequestError(f"{name} must be created_at, got {shown(anchor)}", param=name)
    name, text = "expires_after.seconds", seconds or ""
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise InvalidRequestError(f"{name} must be a whole number, got {shown(seconds)}", param=name)
    return check_range(name, int(text), 3600, 2592000)
