"""From an order to an HTTP response: what chat and legacy completions do alike.

Owns the moment of acceptance: until the engine has accepted every prompt, failures are ordinary HTTP errors; after
it the answer belongs to exactly one reader, which closes it, also when the client leaves before its first byte.
"""

import asyncio
import hashlib
import time
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from weft.engine.shared.messages import EngineInfo
from weft.server.errors import ContextLengthError, InvalidRequestError, ShuttingDownError
from weft.server.formats.parser import OutputParser
from weft.server.generate.answer import Answer, Order, Prompt
from weft.server.generate.choice_stream import ChoiceStream, Delta, StopMatcher, TextOptions
from weft.server.generate.content_stops import ContentStops
from weft.server.http.context import ServerContext
from weft.server.http.metrics import RequestTimer
from weft.server.http.sse import EventStream
from weft.server.request.beam_search import check_unguided
from weft.server.schemas.common import GenerationBody
from weft.server.text.long_text import Room, TextTooLongError
from weft.server.text.stop_strings import StopStrings

NUM_PRIMING_IDS = 8
"""Last ids of a prompt from which a decoder learns that the text has begun: more than a character has bytes."""

CLIENT_CLOSED = 499
"""What nobody reads: the client has left."""

T = TypeVar("T")


class StreamRenderer(Protocol):
    """Writes the events of one stream."""

    def chunks(self, index: int, delta: Delta) -> bytes:
        """The events for one delta."""

    def last_chunk(self) -> bytes:
        """The events after the last delta."""


def check_context(prompts: Sequence[Prompt], max_tokens: int | None, info: EngineInfo, param: str) -> None:
    """Check that every prompt and its output fit.

    Raises:
        ContextLengthError: One does not; the message has both numbers.
    """
    num_output_tokens = 1 if max_tokens is None else max_tokens
    for prompt in prompts:
        if len(prompt.token_ids) + num_output_tokens > info.max_model_len:
            raise _context_length_error(str(len(prompt.token_ids)), len(prompt.token_ids), max_tokens, info, param)


def room(truncate_prompt_tokens: int | None, info: EngineInfo) -> Room:
    """What of a prompt's text can be used at all."""
    return Room(info.max_model_len, keeps_end=truncate_prompt_tokens is not None)


@contextmanager
def checking_context(max_tokens: int | None, info: EngineInfo, param: str) -> Generator[None, None, None]:
    """The same while a text of that field is encoded, which ends as soon as it cannot fit."""
    try:
        yield
    except TextTooLongError as exc:
        shown = f"at least {exc.num_tokens}"
        raise _context_length_error(shown, exc.num_tokens, max_tokens, info, param) from None


def _context_length_error(
    shown: str, num_prompt_tokens: int, max_tokens: int | None, info: EngineInfo, param: str
) -> ContextLengthError:
    num_output_tokens = 1 if max_tokens is None else max_tokens
    is_least = "at least " if shown.startswith("at least ") else ""
    return ContextLengthError(
        f"the context holds at most {info.max_model_len} tokens, but "
        f"{is_least}{num_prompt_tokens + num_output_tokens} were asked for: {shown} in {param} and "
        f"{'at least ' if max_tokens is None else ''}{num_output_tokens} for the output",
        param=param,
    )


def check_token_ids(token_ids: Sequence[int], info: EngineInfo, param: str) -> None:
    """Check ids that a caller sent.

    Raises:
        InvalidRequestError: One is not in the vocabulary.
    """
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < info.vocab_size:
        i = next(i for i, token_id in enumerate(token_ids) if not 0 <= token_id < info.vocab_size)
        raise InvalidRequestError(
            f"{param}[{i}] must be a token id between 0 and {info.vocab_size - 1}, got {token_ids[i]}",
            param=f"{param}[{i}]",
        )


def deadline(request: Request, *, is_stream: bool, ping_s: float) -> float | None:
    """When the client will have given up, on the clock of `time.monotonic`; None when that is not known.

    SDKs say how long they wait for the next byte. In a stream the keep-alive comments are bytes, too.
    """
    try:
        timeout_s = float(request.headers.get("x-stainless-read-timeout", "nan"))
    except ValueError:
        return None
    if not 0 < timeout_s < 1e9 or (is_stream and 0 < ping_s < timeout_s):
        return None
    return time.monotonic() + timeout_s


def tenant(request: Request, *names: str | None) -> str:
    """Whom this work is done for, as a digest: the API key, else the first name that the caller gave, else nobody.

    The engine is told, and schedules nobody by it yet.
    """
    name = getattr(request.state, "api_key", None) or next((name for name in names if name), None)
    return "" if name is None else hashlib.blake2s(name.encode("utf-8", "replace"), digest_size=8).hexdigest()


async def open_answer(
    context: ServerContext,
    request: Request,
    order: Order,
    text_options: TextOptions,
    stops: Sequence[str],
    *,
    skip_special_tokens: bool,
    continues_prompt: bool,
    kept_ids: Set[int] = frozenset(),
    new_parser: Callable[[], OutputParser] | None = None,
) -> Answer:
    """Have an order accepted. Whoever gets the answer closes it.

    Args:
        continues_prompt: The text goes on where the prompt's ends; else it begins anew, in some vocabularies without
            a space.
        kept_ids: Control tokens that stay in the text in any case.
        new_parser: Tells what of the text is content, which alone is searched for stop strings; None: all of it is.
    """
    check_unguided(order.requests[0])

    def choice(prompt: Prompt) -> ChoiceStream:
        detokenizer = context.tokenizer.detokenizer(skip_special_tokens, kept_ids)
        if continues_prompt:
            for token_id in prompt.token_ids[-NUM_PRIMING_IDS:]:
                detokenizer.feed(token_id)
        matcher: StopMatcher | None = StopStrings(stops, text_options.include_stop) if stops else None
        if matcher is not None and new_parser is not None:
            matcher = ContentStops(new_parser(), matcher)
        return ChoiceStream(detokenizer, matcher, text_options)

    choices = [choice(prompt) for prompt in order.prompts for _ in range(order.requests[0].num_choices)]
    timer = RequestTimer(context.metrics, request.state.arrival_time, len(choices))
    block_size = context.engine_info.block_size if context.settings.prefix_caching else 0
    answer = Answer(order, choices, timer, block_size)
    context.metrics.note_retry(request.headers.get("x-stainless-retry-count", ""))
    await answer.open(context.engine_client)
    timer.accept([len(prompt.token_ids) for prompt in order.prompts])
    return answer


def stream_response(
    answer: Answer, renderer: StreamRenderer, headers: Mapping[str, str], context: ServerContext
) -> Response:
    """Stream an answer; it is closed with the response."""
    return EventStream(
        answer.rendered(renderer.chunks),
        renderer.last_chunk,
        headers=headers,
        ping_s=context.settings.sse_ping_s,
        close=answer.close,
    )


async def plain_response(
    answer: Answer, render: Callable[[list[Delta]], bytes], headers: Mapping[str, str]
) -> Response:
    """Wait for the whole answer; closed when it is there, or at once when this is cancelled."""
    try:
        deltas = await answer.whole()
    finally:
        answer.close()
    return Response(render(deltas), headers=dict(headers), media_type="application/json")


async def while_wanted(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """Await the work, but cancel it when the client leaves; None then. The body must have been read.

    Raises:
        ShuttingDownError: The drain has cut it.
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
            raise ShuttingDownError("the server is shutting down and had to cut this request")
        return working.result() if working.done() else None
    finally:
        unanswered.discard(working)
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


def cache_salt(*parts: str | None) -> str:
    """One salt from several; empty when there are none. No two lists of parts have the same salt."""
    given = [f"{len(part)}:{part}" if part else "" for part in parts]
    return ",".join(given) if any(given) else ""


def num_choices(body: GenerationBody) -> int:
    """How many answers each prompt gets."""
    return 1 if body.n is None else body.n
