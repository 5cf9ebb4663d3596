"""/v1/files and /v1/uploads: files of an API key, sent at once or in parts; and all bodies that ask for them.

A file is acknowledged once it is on the disk. The parts of an upload become one file at its end, and until then they
expire.
"""

import time
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO, Literal, get_args

import msgspec
from fastapi import APIRouter
from pydantic import ConfigDict, Field
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.types import Receive, Scope, Send
from typing_extensions import override

from weft.server import errors
from weft.server.apis.openai.pages import json_answer, list_answer, read_page
from weft.server.http.auth import tenant_of
from weft.server.http.context import Context, ServerContext
from weft.server.http.form import Form, read_form
from weft.server.store import contents
from weft.server.store.contents import Arrival, Content, content_path, discard
from weft.server.store.store import Store
from weft.server.store.transaction import Row, Transaction
from weft.server.task.body import CLIENT_CLOSED, BodyRoute
from weft.server.task.schema import Text, WireModel
from weft.server.task.validation import check_range, ignored_fields, ignored_header

Purpose = Literal["batch", "user_data", "vision"]
"""What a file may be for. OpenAI has more purposes, for what Weft does not do."""


class ExpiresAfter(WireModel):
    """When a file goes."""

    model_config = ConfigDict(extra="forbid")

    anchor: Literal["created_at"]
    seconds: int = Field(ge=3600, le=2592000)


class UploadBody(WireModel):
    """POST /v1/uploads."""

    bytes: int = Field(ge=1)
    filename: Text = Field(min_length=1, max_length=255)
    mime_type: Text = Field(max_length=255)
    purpose: Purpose
    expires_after: ExpiresAfter | None = None


class CompleteBody(WireModel):
    """POST /v1/uploads/{id}/complete."""

    part_ids: list[Text] = Field(max_length=10_000)
    md5: Text | None = None


class BatchBody(WireModel):
    """POST /v1/batches."""

    input_file_id: Text
    endpoint: Text
    completion_window: Literal["24h"]
    metadata: dict[Text, Text] | None = None
    output_expires_after: ExpiresAfter | None = None


@dataclass(frozen=True, slots=True)
class StoredForm:
    """A form, and the content of its file, which the caller keeps or discards."""

    form: Form
    content: Content
    arrival: Arrival

    async def discard(self, store: Store) -> None:
        """Remove the content, and give its room back."""
        await discard(store, self.content)
        await self.arrival.drop()


async def store_form(
    request: Request, store: Store, tenant: str, id: str, file_field: str, max_file_bytes: int
) -> StoredForm:
    """Read a form whose file goes to the disk, as the content of `id`; nothing is left of it if this fails.

    Raises:
        ApiError: It is not such a form, too large, or there is no room.
        ClientDisconnect: The client left.
    """
    declared = request.headers.get("content-length", "")
    arrival = Arrival(store, id, tenant, min(int(declared), max_file_bytes) if declared.isdecimal() else 0)
    content = await store.run(partial(Content, content_path(store, id)))

    async def write(data: bytes) -> None:
        await arrival.take(len(data))
        await store.run(partial(content.write, data))

    try:
        form = await read_form(request, file_field, max_file_bytes, write)
        await store.run(content.finish)
    except BaseException:
        await discard(store, content)
        await arrival.drop()
        raise
    return StoredForm(form, content, arrival)


BATCH_FILE_S = 30 * 86400
"""A file for a batch expires after so long, if nothing else was asked."""
_FORM_FIELDS = {"purpose", "expires_after[anchor]", "expires_after[seconds]"}
UPLOAD_LIFE_S = 3600
"""An upload that is not completed expires after so long."""
MAX_PARTS = 10_000
"""Most parts of an upload."""


router = APIRouter()
body_router = APIRouter(route_class=BodyRoute)
"""Of the routes that take JSON, which `BodyRoute` reads; the others take forms or nothing. `router` includes it."""


@router.post("/v1/files")
async def create_file(request: Request, context: Context) -> Response:
    """Store a file, sent as a multipart form."""
    id, store, tenant = contents.new_id("file-"), context.store, tenant_of(request)
    try:
        stored = await store_form(request, store, tenant, id, "file", context.settings.max_file_bytes)
    except ClientDisconnect:
        return Response(status_code=CLIENT_CLOSED)
    form, content = stored.form, stored.content
    unknown = sorted((form.fields.keys() | form.lists.keys()) - _FORM_FIELDS)
    try:
        if unknown and context.settings.strict_params:
            raise errors.UnknownParameterError(f"unknown parameter: {errors.shown(unknown[0])}", param=unknown[0])
        purpose = form.fields.get("purpose", "")
        if purpose not in get_args(Purpose):
            wanted = " or ".join(get_args(Purpose))
            raise errors.InvalidRequestError(f"purpose must be {wanted}, got {errors.shown(purpose)}", param="purpose")
        expires_at = expiry(purpose, _expires_after(form.fields))
        fields = {"bytes": content.size, "filename": form.filename, "purpose": purpose, "expires_at": expires_at}
        row = contents.file_row(id, tenant, content.checksum, **fields)

        def keep(transaction: Transaction) -> None:
            stored.arrival.stored(transaction)
            transaction.put(row)

        await store.write(keep)
    except BaseException:
        await stored.discard(store)
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
    row = await find_file(file_id, request, context)
    return _ContentResponse(await context.store.run(partial(contents.open_content, context.store, row), row.size))


class _ContentResponse(FileResponse):
    """An open file, by a name that it keeps when it is deleted."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(f"/proc/self/fd/{file.fileno()}", media_type="application/octet-stream")
        self._file = file

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._file:
            await super().__call__(scope, receive, send)


@router.delete("/v1/files/{file_id}")
async def delete_file(file_id: str, request: Request, context: Context) -> Response:
    """Remove a file."""
    row = await find_file(file_id, request, context)
    remove = partial(context.store.write, lambda transaction: transaction.delete("file", row.id, row.tenant))
    try:
        is_removed = await remove()
    except errors.StorageFullError:  # its content gives back the room that removing the row needs
        await contents.remove_contents(context.store, [row.id])
        is_removed = await remove()
    if not is_removed:  # another request was faster
        raise errors.NotFoundError(f"no such file: {errors.shown(file_id)}", param="file_id")
    await contents.remove_contents(context.store, [row.id])
    return json_answer({"id": file_id, "object": "file", "deleted": True})


async def find_file(file_id: str, request: Request, context: ServerContext, param: str = "file_id") -> Row:
    """The row of a file. Raises NotFoundError if this API key has no such file."""
    tenant = tenant_of(request)
    row = await context.store.read(lambda transaction: transaction.get("file", file_id, tenant))
    if row is None:
        raise errors.NotFoundError(f"no such file: {errors.shown(file_id)}", param=param)
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
        raise errors.InvalidRequestError(f"{name} must be created_at, got {errors.shown(anchor)}", param=name)
    name, text = "expires_after.seconds", seconds or ""
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise errors.InvalidRequestError(f"{name} must be a whole number, got {errors.shown(seconds)}", param=name)
    return check_range(name, int(text), 3600, 2592000)


@body_router.post("/v1/uploads")
async def create_upload(body: UploadBody, request: Request, context: Context) -> Response:
    """Begin an upload."""
    ignored = ignored_fields(body, {}, strict=context.settings.strict_params)
    check_range("bytes", body.bytes, 1, context.settings.max_file_bytes)
    now = int(time.time())
    seconds = body.expires_after.seconds if body.expires_after else None
    shown_fields = {"id": contents.new_id("upload_"), "object": "upload", "bytes": body.bytes, "created_at": now}
    shown_fields |= {"expires_at": now + UPLOAD_LIFE_S, "filename": body.filename, "purpose": body.purpose}
    upload = shown_fields | {"status": "pending", "file": None, "expires_after": seconds}
    row = _upload_row(upload, tenant_of(request))
    await context.store.write(lambda transaction: transaction.put(row))
    return _upload_answer(upload, ignored_header(ignored))


@router.post("/v1/uploads/{upload_id}/parts")
async def add_part(upload_id: str, request: Request, context: Context) -> Response:
    """Store one part, sent as a multipart form."""
    tenant, id, store = tenant_of(request), contents.new_id("part_"), context.store
    upload = await store.read(lambda transaction: _pending_upload(transaction, upload_id, tenant))
    try:
        max_bytes = min(context.settings.max_file_bytes, upload["bytes"])
        stored = await store_form(request, store, tenant, id, "data", max_bytes)
    except ClientDisconnect:
        return Response(status_code=CLIENT_CLOSED)
    size, now = stored.content.size, int(time.time())
    part = {"id": id, "object": "upload.part", "created_at": now, "upload_id": upload_id}

    def add(transaction: Transaction) -> None:
        upload = _pending_upload(transaction, upload_id, tenant)
        parts = _parts_of(transaction, upload_id, tenant)
        total = sum(part.size - 1 for part in parts.values()) + size
        if total > upload["bytes"] or len(parts) >= MAX_PARTS:
            bound = f"{upload['bytes']} bytes in {MAX_PARTS} parts"
            raise errors.InvalidRequestError(f"the parts must have at most {bound}, got {total}", param="data")
        data, expires = msgspec.json.encode(part), upload["expires_at"]
        checksum = stored.content.checksum
        stored.arrival.stored(transaction)
        transaction.put(Row("part", id, tenant, data, upload_id, now, expires, True, size + 1, checksum))

    try:
        await store.write(add)
    except BaseException:
        await stored.discard(store)
        raise
    return json_answer(part)


@body_router.post("/v1/uploads/{upload_id}/complete")
async def complete_upload(upload_id: str, body: CompleteBody, request: Request, context: Context) -> Response:
    """Make a file of the parts, in the order of `part_ids`."""
    ignored = ignored_fields(body, {}, strict=context.settings.strict_params)
    tenant, store, file_id = tenant_of(request), context.store, contents.new_id("file-")
    upload = await store.read(lambda transaction: _pending_upload(transaction, upload_id, tenant))
    parts = await store.read(lambda transaction: _parts_of(transaction, upload_id, tenant))
    _check_parts(body.part_ids, parts, upload["bytes"])
    content = await store.run(partial(contents.Content, contents.content_path(store, file_id)))
    expires_at = expiry(upload["purpose"], upload["expires_after"])
    fields = {"bytes": upload["bytes"], "filename": upload["filename"], "purpose": upload["purpose"]}

    def finish(transaction: Transaction) -> dict[str, Any]:
        row = contents.file_row(file_id, tenant, content.checksum, **fields, expires_at=expires_at)
        done = upload | {"status": "completed", "file": msgspec.Raw(row.data)}
        _pending_upload(transaction, upload_id, tenant)
        transaction.delete("upload", upload_id, tenant)
        transaction.put(_upload_row(done, tenant))
        transaction.put(row)
        return done

    try:
        joined = partial(contents.join, store, [parts[id] for id in body.part_ids], content, body.md5)
        await store.run(joined, 2 * upload["bytes"])
        done = await store.write(finish)
    except BaseException as exc:
        await contents.discard(store, content)
        if isinstance(
            exc, (errors.NotFoundError, errors.StorageError)
        ):  # another request may have completed it, and so removed the parts
            await store.read(lambda transaction: _pending_upload(transaction, upload_id, tenant))
        raise
    await contents.remove_contents(store, parts)
    return _upload_answer(done, ignored_header(ignored))


@router.post("/v1/uploads/{upload_id}/cancel")
async def cancel_upload(upload_id: str, request: Request, context: Context) -> Response:
    """End an upload without a file."""
    tenant = tenant_of(request)

    def cancel(transaction: Transaction) -> tuple[dict[str, Any], dict[str, Row]]:
        upload = _pending_upload(transaction, upload_id, tenant) | {"status": "cancelled"}
        parts = _parts_of(transaction, upload_id, tenant)
        transaction.delete("upload", upload_id, tenant)
        transaction.put(_upload_row(upload, tenant))
        return upload, parts

    upload, parts = await context.store.write(cancel)
    await contents.remove_contents(context.store, parts)
    return _upload_answer(upload, {})


def _upload_row(upload: dict[str, Any], tenant: str) -> Row:
    data, is_kept = msgspec.json.encode(upload), upload["status"] == "pending"
    return Row("upload", upload["id"], tenant, data, "", upload["created_at"], upload["expires_at"], is_kept=is_kept)


def _upload_answer(upload: dict[str, Any], headers: dict[str, str]) -> Response:
    shown_fields = {name: value for name, value in upload.items() if name != "expires_after"}
    return json_answer(shown_fields, headers)


def _pending_upload(transaction: Transaction, upload_id: str, tenant: str) -> dict[str, Any]:
    row = transaction.get("upload", upload_id, tenant)
    if row is None:
        raise errors.NotFoundError(f"no such upload, or it has expired: {errors.shown(upload_id)}", param="upload_id")
    upload: dict[str, Any] = msgspec.json.decode(row.data)
    if upload["status"] != "pending":
        raise errors.InvalidRequestError(f"the upload must be pending, it is {upload['status']}", param="upload_id")
    return upload


def _parts_of(transaction: Transaction, upload_id: str, tenant: str) -> dict[str, Row]:
    rows = transaction.page("part", tenant, parent=upload_id, limit=MAX_PARTS, order="asc")
    return {row.id: row for row in rows or ()}


def _check_parts(part_ids: list[str], parts: dict[str, Row], num_bytes: int) -> None:
    unused = dict(parts)
    for i, id in enumerate(part_ids):
        if unused.pop(id, None) is None:
            message = f"part_ids[{i}] must be a part of this upload, each once, got {errors.shown(id)}"
            raise errors.InvalidRequestError(message, param=f"part_ids[{i}]")
    total = sum(parts[id].size - 1 for id in part_ids)
    if total != num_bytes:
        raise errors.InvalidRequestError(
            f"the parts must have {num_bytes} bytes together, got {total}", param="part_ids"
        )


router.include_router(body_router)
