"""Bodies of files, uploads and batches."""

from typing import Literal

from pydantic import ConfigDict, Field

from weft.server.schemas.common import Text, WireModel

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
