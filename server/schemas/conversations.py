"""Wire types of /v1/conversations: the bodies, and the conversation that answers show."""

from typing import Annotated, Literal

import msgspec
from pydantic import Field

from weft.server.schemas.chat_completions import Metadata
from weft.server.schemas.common import WireModel
from weft.server.schemas.responses import ResponseItem

MAX_NEW_ITEMS = 20
"""Most items that one call adds."""

NewItems = Annotated[list[ResponseItem], Field(fail_fast=True, max_length=MAX_NEW_ITEMS)]


class ConversationBody(WireModel):
    """The body of POST /v1/conversations."""

    items: NewItems | None = None
    metadata: Metadata | None = None


class ConversationUpdate(WireModel):
    """The body of POST /v1/conversations/{id}."""

    metadata: Metadata | None


class ItemsBody(WireModel):
    """The body of POST /v1/conversations/{id}/items."""

    items: NewItems


class ConversationObject(msgspec.Struct):
    """A conversation, without its items."""

    id: str
    created_at: int
    metadata: dict[str, str]
    object: Literal["conversation"] = "conversation"
