"""The bodies that ask for files, uploads and batches, and the form that brings a file."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

from pydantic import ConfigDict, Field
from starlette.requests import Request

from weft.server.apis.batches.contents import Arrival, Content, content_path, discard
from weft.server.http.form import Form, read_form
from weft.server.store.store import Store
from weft.server.task.schema import Text, WireModel

Purpose = Literal["batch", "user_data"]
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
