"""POST /v1/completions: turns a body into a task, and renders its events as JSON, streamed or plain.

Other APIs of prompts convert their bodies to completion bodies, and build their tasks with `completion_task` too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import msgspec
from fastapi import APIRouter
from msgspec import UNSET
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from weft.engine.wire.messages import TokenLogprobs
from weft.server.apis.openai import render
from weft.server.errors import InvalidRequestError
from weft.server.generate.events import End, Event, Part, Report, Text, Token, TokenIds, WholeChoice
from weft.server.generate.pipeline import respond
from weft.server.http.context import Context, ServerContext, early_headers_while_loading
from weft.server.http.sse import TextEvent, encode_event
from weft.server.task.bodies import Completion, CompletionBody, CompletionChoice, CompletionLogprobs
from weft.server.task.body import BodyRoute
from weft.server.task.fill_in import FillIn, fill_in
from weft.server.task.read_body import MAX_LOGPROBS, num_prompt_logprobs, read_task
from weft.server.task.structured_output import structure_of
from weft.server.task.task import OutputWishes, Prompt, Task, Texts
from weft.server.task.validation import NOTHING, REFUSED_EVERYWHERE, Refused, check_range
from weft.server.text.text_tokenizer import TextTokenizer

REFUSED_IN_COMPLETIONS: Refused = {
    **REFUSED_EVERYWHERE,
    "prediction": NOTHING,
    "thinking_token_budget": NOTHING,
    "reasoning_budget_tokens": NOTHING,
}

DEFAULT_MAX_TOKENS = 16


async def completion_task(
    body: CompletionBody,
    request: Request,
    context: ServerContext,
    *,
    sent: BaseModel | None = None,
    refused: Refused = REFUSED_IN_COMPLETIONS,
    is_bounded: bool = True,
) -> Task:
    """Check every field, and build the task.

    Args:
        sent: See `chat_task`.
        refused: Fields that the endpoint refuses; see `ignored_fields`.
        is_bounded: Without `max_tokens` the output has few tokens; if not, or if the model has an encoder, it may fill
            the context.

    Raises:
        ApiError: A field is wrong, or the model is not served.
    """
    size = len(await request.body())
    num_made = _num_made(body, context.settings.max_n)
    model = await context.check_model(request, body.model)
    filling = _filling(body, model.tokenizer)
    if model.seq2seq and body.echo:
        raise InvalidRequestError("echo is only allowed for a model without an encoder", param="echo")
    logprobs = shown_logprobs(body)
    items = _items(body.prompt)
    if items is not None:  # more prompts would never fit the queue; refuse them before any work
        check_range("the number of prompts", len(items), 0, context.settings.max_num_waiting, param="prompt")
    return await read_task(
        body,
        request,
        context,
        refused,
        sent=sent,
        input=Texts(items, body.add_special_tokens is not False, body.suffix or "", filling),
        wishes=OutputWishes(structure=await context.workers.run_light(size, structure_of, body)),
        max_tokens=_max_tokens(body, is_bounded=is_bounded and not model.seq2seq),
        logprobs=logprobs,
        prompt_logprobs=num_prompt_logprobs(body, logprobs if body.echo else None),
        num_made=num_made,
        user=body.user,
    )


def _max_tokens(body: CompletionBody, *, is_bounded: bool) -> int | None:
    if body.prewarm:
        return 0
    if body.max_tokens is None and not is_bounded:
        return None
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    return check_range("max_tokens", max_tokens, 0 if body.echo else 1, None)


def shown_logprobs(body: CompletionBody) -> int | None:
    """Number of most probable alternatives per token; None if logprobs were not requested."""
    if body.logprobs is None:
        return 0 if body.logprob_token_ids else None
    return check_range("logprobs", body.logprobs, 0, MAX_LOGPROBS)


def _filling(body: CompletionBody, tokenizer: TextTokenizer) -> FillIn | None:
    """How this vocabulary asks for the text before the suffix; None if there is no suffix."""
    if not body.suffix:
        return None
    if body.echo:
        raise InvalidRequestError("echo cannot be used with suffix", param="echo")
    return fill_in(tokenizer)


def _num_made(body: CompletionBody, max_n: int) -> int | None:
    """Number of choices that the engine generates for each prompt; None: as many as are returned."""
    n = 1 if body.n is None else body.n
    if body.best_of is None:
        return None
    check_range("best_of", body.best_of, n, max_n)
    if body.stream and body.best_of > n:
        raise InvalidRequestError("best_of cannot be used with stream: the best is known at the end", param="best_of")
    return body.best_of


def _items(prompt: str | Sequence[str | int | list[int]] | None) -> list[tuple[str, str | list[int]]] | None:
    """Each prompt with its path in the body. A list of numbers is one prompt."""
    if prompt is None:
        return None
    if isinstance(prompt, str):
        return [("prompt", prompt)]
    if prompt and isinstance(prompt[0], int):
        return [("prompt", cast(list[int], prompt))]
    return [(f"prompt[{i}]", item) for i, item in enumerate(cast(Sequence[str | list[int]], prompt))]


@dataclass(frozen=True, slots=True)
class PromptEcho:
    """The caller's text, or the text of its token ids; and the offset of each token in it."""

    text: str
    starts: list[int]


def echo_prompt(prompt: Prompt, tokenizer: TextTokenizer, *, skip_special_tokens: bool) -> PromptEcho:
    """The prompt's text for `echo`, and the text offsets for legacy logprobs. O(tokens)."""
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip_special_tokens and prompt.text is None)
    starts: list[int] = []
    pieces: list[str] = []
    num_chars = 0
    for token_id in prompt.token_ids:
        starts.append(num_chars)
        pieces.append(detokenizer.feed(token_id))
        num_chars += len(pieces[-1])
    text = "".join(pieces) + detokenizer.finish()
    if prompt.text is None:
        return PromptEcho(text, starts)
    # A beginning-of-text token in front of the prompt is not part of the caller's text.
    num_added = len(text) - len(prompt.text) if text.endswith(prompt.text) else 0
    return PromptEcho(prompt.text, [min(max(0, start - num_added), len(prompt.text)) for start in starts])


_Row = tuple[int, int, TokenLogprobs | None]
"""(token id, offset of its text, log-probabilities or None for the first token of a prompt)."""


class CompletionRenderer(render.OpenAIRenderer):
    """Writes the answer to one HTTP request; does no I/O.

    Only `stream` mutates it: it records the choices that have begun.
    """

    def __init__(self, task: Task, options: render.RenderOptions, report: Report, *, echo: bool) -> None:
        """Prepare to write an answer; writes nothing yet. O(prompt tokens) for `echo` and for logprobs."""
        super().__init__("cmpl", task, options, report)
        self._num_choices = task.num_made
        self._echo = echo
        self._echoes: list[PromptEcho] = []
        if echo or options.logprobs is not None:
            skips = task.text.skip_special_tokens
            self._echoes = [
                echo_prompt(each.prompt, self._tokenizer, skip_special_tokens=skips) for each in report.prompts
            ]
        self._text_events: dict[int, TextEvent | None] = {}  # by begun choice; None if more than text can change

    def stream(self, index: int, events: Sequence[Event]) -> bytes:
        """One chunk with what the choice gained; the echoed prompt comes first."""
        text_event = self._text_events.get(index)
        if text_event is not None and len(events) == 1 and isinstance(events[0], Text):
            return text_event.fill(events[0].text)
        written = b""
        is_first = index not in self._text_events
        if is_first:
            only_text = self._options.only_text_changes
            self._text_events[index] = TextEvent(lambda text: self._text_chunk(index, text)) if only_text else None
        if is_first and self._echo:
            choice = CompletionChoice(index, self._echo_of(index).text, None, None)
            choice.logprobs = self._logprobs(self._prompt_rows(index))
            written += self._event(choice, is_first=True)
            is_first = False
        gained = CompletionChoice(index, "", None, None)
        tokens: Sequence[Token] = ()
        for event in events:
            match event:
                case Text():
                    gained.text, tokens = event
                case TokenIds():
                    gained.token_ids = event.token_ids
                case End():
                    gained.finish_reason, gained.stop_reason = render.FINISH_WORDS[event.reason], event.stop_reason
        gained.logprobs = self._logprobs(self._output_rows(index, tokens))
        if self._options.token_ids and gained.token_ids is UNSET:
            gained.token_ids = []
        return written + self._event(gained, is_first=is_first)

    def whole(self, choices: Sequence[WholeChoice]) -> bytes:
        """The whole plain answer."""
        answered = [self._whole_choice(position, choice) for position, choice in enumerate(choices)]
        completion = Completion(**self._envelope, choices=answered, usage=self._usage())
        completion.kv_transfer_params = self._options.transfer
        return msgspec.json.encode(completion)

    def _usage_chunk(self) -> msgspec.Struct:
        return Completion(**self._envelope, choices=[], usage=self._usage())

    def _whole_choice(self, position: int, choice: WholeChoice) -> CompletionChoice:
        text, rows = choice.text, self._output_rows(choice.index, choice.tokens)
        if self._echo:
            text = self._echo_of(choice.index).text + text
            rows = self._prompt_rows(choice.index) + rows
        end = choice.end
        finish_reason = render.FINISH_WORDS[end.reason]
        answered = CompletionChoice(position, text, self._logprobs(rows), finish_reason, end.stop_reason)
        if self._options.token_ids:
            answered.token_ids = choice.token_ids
        self._add_prompt(answered, choice.index)
        answered.prompt_logprobs = self._prompt_logprobs(choice.index)
        return answered

    def _event(self, choice: CompletionChoice, *, is_first: bool) -> bytes:
        if is_first:
            self._add_prompt(choice, choice.index)
        chunk = self._chunk(choice)
        chunk.obfuscation = self._obfuscation(choice.text)
        return encode_event(chunk)

    def _text_chunk(self, index: int, text: str) -> Completion:
        return self._chunk(CompletionChoice(index, text, None, None))

    def _chunk(self, choice: CompletionChoice) -> Completion:
        return Completion(**self._envelope, choices=[choice], usage=self._chunk_usage())

    def _echo_of(self, index: int) -> PromptEcho:
        return self._echoes[index // self._num_choices]

    def _prompt_rows(self, index: int) -> list[_Row]:
        if self._options.logprobs is None:
            return []
        report = self._report.prompt_of(index)
        logprobs = [None, *(report.logprobs or [])]
        return list(zip(report.prompt.token_ids, self._echo_of(index).starts, logprobs, strict=True))

    def _output_rows(self, index: int, tokens: Sequence[Token]) -> list[_Row]:
        if self._options.logprobs is None:
            return []
        base = len(self._echo_of(index).text)
        return [(t.token_id, base + t.start, t.logprobs) for t in tokens if t.part is not Part.CUT]

    def _logprobs(self, rows: Sequence[_Row]) -> CompletionLogprobs | None:
        if self._options.logprobs is None:
            return None
        return CompletionLogprobs(
            [self._tokenizer.token_text(token_id) for token_id, _, _ in rows],
            [None if logprobs is None else max(logprobs.logprob, render.MIN_LOGPROB) for _, _, logprobs in rows],
            [None if logprobs is None else self._top(token_id, logprobs) for token_id, _, logprobs in rows],
            [start for _, start, _ in rows],
        )

    def _top(self, token_id: int, logprobs: TokenLogprobs) -> dict[str, float]:
        """The alternatives and the token itself, by text. If ids share a text, the most probable one counts."""
        top: dict[str, float] = {}
        count = self._options.logprobs
        pairs = zip(logprobs.top_token_ids[:count], logprobs.top_logprobs[:count], strict=True)
        for other_id, logprob in [*pairs, (token_id, logprobs.logprob)]:
            text = self._tokenizer.token_text(other_id)
            top[text] = max(logprob, top.get(text, render.MIN_LOGPROB))
        return top


router = APIRouter(route_class=BodyRoute)


@router.post("/v1/completions")
async def create_completion(body: CompletionBody, request: Request, context: Context) -> Response:
    """Continue one prompt or several, streamed or whole."""
    return await early_headers_while_loading(_answer(body, request, context), body, context, render.stream_error)


async def _answer(body: CompletionBody, request: Request, context: ServerContext) -> Response:
    task = await completion_task(body, request, context)
    options = render.render_options(body, shown_logprobs(body))
    return await respond(task, request, context, partial(CompletionRenderer, task, options, echo=bool(body.echo)))
