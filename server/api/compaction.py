"""POST /v1/responses/compact: a conversation as the user's messages and a sealed summary that the model writes.

The summary is one more answer of the generation pipeline, to a fixed instruction behind the items. It comes back as an
item `compaction` of an input, and stands there as a message of the assistant.
"""

import secrets
import time
from dataclasses import replace
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from weft.server.api.responses import read_chat
from weft.server.errors import InternalError, InvalidRequestError
from weft.server.generate.partial_answer import complete
from weft.server.http.auth import tenant_of
from weft.server.http.context import ServerContext, get_context
from weft.server.render.responses import usage_of
from weft.server.request.fields import ACCEPTED_IN_RESPONSES, REFUSED_IN_COMPACT, ignored_header
from weft.server.request.gathered_items import gathered_items
from weft.server.request.read_body import read_task
from weft.server.request.response_input import InputItem, items_to_store
from weft.server.schemas.responses import (
    CompactBody,
    CompactedResponse,
    CompactionItem,
    ReasoningOptions,
    ResponseBody,
    ResponseItem,
)
from weft.server.store.responses import item_id
from weft.server.store.sealing import Sealer
from weft.server.task.body import BodyRoute

MAX_SUMMARY_TOKENS = 1024
INSTRUCTION = (
    "Summarise the conversation so far, so that it can be continued from your summary alone. Keep the facts, names, "
    "numbers, decisions, results of tools and open questions. Write only the summary."
)

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/responses/compact")
async def compact(
    body: CompactBody, request: Request, context: Annotated[ServerContext, Depends(get_context)]
) -> Response:
    """Summarise the items. The summary is as long as the context has room for, and at most `MAX_SUMMARY_TOKENS`."""
    asked = ResponseBody(
        **{name: getattr(body, name) for name in CompactBody.model_fields},
        reasoning=ReasoningOptions(effort="none"),
    )
    model, tenant = await context.check_model(request, body.model), tenant_of(request)
    gathered = await gathered_items(asked, request, context)
    items = gathered.all
    if not items:
        raise InvalidRequestError("input must hold at least one item, got none", param="input")
    sealer = await context.store.run(lambda: Sealer(context.store.folder, tenant))
    last = InputItem(ResponseItem(role="user", content=INSTRUCTION), "input")
    chat, wishes = await read_chat(asked, [*items, last], sealer, model, context, gathered.size)
    task = await read_task(
        asked,
        request,
        context,
        REFUSED_IN_COMPACT,
        sent=body,
        input=chat,
        wishes=replace(wishes, thinking=replace(wishes.thinking, ignored=())),
        max_tokens=MAX_SUMMARY_TOKENS,
        logprobs=None,
        prompt_logprobs=None,
        user=None,
        accepted=ACCEPTED_IN_RESPONSES,
    )
    ((choice,), report) = await complete(replace(task, fits_context=True, size=gathered.size), request, context)
    if not choice.text.strip():
        raise InternalError("the model wrote no summary of the input")
    id = f"resp_{secrets.token_hex(24)}"
    kept = items_to_store([each for each in items if each.item.role == "user"], id)
    summary = CompactionItem(item_id("cmp", id, 0), sealer.seal("compaction", choice.text))
    answer = CompactedResponse(id, int(time.time()), [*kept, summary], usage_of(report.counts()))
    return Response(msgspec.json.encode(answer), headers=ignored_header(task.ignored), media_type="application/json")
