"""POST /completion and /infill, in llama.cpp's shape: their bodies, the routes, and the answers, streamed or whole.

A body is converted to a completion body, and then handled as one. Errors name its fields as the caller wrote them. An
event of a stream has text, its tokens and their probabilities; counts and timings come at the end.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter
from msgspec import UNSET, UnsetType
from pydantic import Discriminator, Field, Tag
from starlette.requests import Request
from starlette.responses import Response

from weft.engine.wire.messages import FinishReason
from weft.server.apis.openai.completions import completion_task
from weft.server.apis.openai.render import MIN_LOGPROB
from weft.server.errors import ApiError, GrammarError
from weft.server.generate.events import End, Event, Part, Report, Text, Token, TokenIds, WholeChoice
from weft.server.generate.pipeline import respond
from weft.server.http.context import Context, ServerContext
from weft.server.http.metrics import Stopwatch
from weft.server.http.middleware import llama_cpp_error
from weft.server.http.sse import encode_event
from weft.server.task import schema
from weft.server.task.bodies import CompletionBody
from weft.server.task.body import AnyTypeRoute
from weft.server.task.task import Task
from weft.server.task.validation import Refused, renamed, renaming

Bias = float | Literal[False]
"""What is added to a token's logit; false: the token never comes."""
BiasPair = Annotated[list[Bias], Field(min_length=2, max_length=2)]
"""A token id and its bias."""
Biases = Annotated[
    Annotated[schema.Members[Bias], Tag("object")]
    | Annotated[schema.Items[BiasPair], Field(max_length=schema.MAX_MEMBERS), Tag("list")],
    Discriminator(lambda value: "object" if isinstance(value, dict) else "list"),
]


class LlamaCppBody(schema.WireModel):
    """What both bodies have. Extensions of llama.cpp to sampling that are not here are refused if they are on."""

    model: schema.Text | None = None
    stream: bool | None = None
    n_predict: schema.Int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: schema.TextOrTexts | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Biases | None = None
    ignore_eos: bool | None = None
    n_probs: schema.Int | None = None
    return_tokens: bool | None = None
    cache_prompt: bool | None = None
    grammar: schema.Text | None = None
    json_schema: dict[str, Any] | None = None


class LlamaCppCompletionBody(LlamaCppBody):
    """The body of POST /completion."""

    prompt: Annotated[
        Annotated[schema.Text, Tag("text")] | Annotated[schema.Items[schema.Int], Tag("other")], schema.TEXT_OR_OTHER
    ]


class ExtraText(schema.WireModel):
    """Another file, which the model sees in front of the prefix."""

    text: schema.Text
    filename: schema.Text | None = None


class InfillBody(LlamaCppBody):
    """The body of POST /infill. `prompt` is the beginning of the text to fill in."""

    input_prefix: schema.Text
    input_suffix: schema.Text
    input_extra: Annotated[schema.Items[ExtraText], Field(max_length=schema.MAX_MEMBERS)] | None = None
    prompt: schema.Text | None = None


class TokenProb(msgspec.Struct):
    """One token with its log-probability."""

    id: int
    token: str
    bytes: list[int]
    logprob: float


class CompletionProb(TokenProb):
    """One token of the answer, and the most probable ones in its place."""

    top_logprobs: list[TokenProb]


class Timings(msgspec.Struct):
    """How long the prompt and the output took."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class LlamaCppAnswer(msgspec.Struct, kw_only=True):
    """The whole answer, or one event of a stream; what follows `tokens_evaluated` comes at the end only."""

    index: int = 0
    content: str
    tokens: list[int]
    stop: bool
    id_slot: int = -1
    tokens_predicted: int
    tokens_evaluated: int
    completion_probabilities: list[CompletionProb] | UnsetType = UNSET
    model: str | UnsetType = UNSET
    prompt: str | UnsetType = UNSET
    truncated: bool | UnsetType = UNSET
    stop_type: Literal["eos", "word", "limit"] | UnsetType = UNSET
    stopping_word: str | UnsetType = UNSET
    has_new_line: bool | UnsetType = UNSET
    tokens_cached: int | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET


RENAMED: Mapping[str, str] = {
    r"^max_tokens": "n_predict",
    r"^repetition_penalty": "repeat_penalty",
    r"^logprobs": "n_probs",
    r"^guided_json": "json_schema",
    r"^structured_outputs\.grammar": "grammar",
    r"^suffix": "input_suffix",
}
"""Beginnings of paths in the completion body, and what the caller calls them."""

REFUSED_IN_LLAMA_CPP: Refused = {
    "mirostat": (None, 0),
    "typical_p": (None, 1),
    "dynatemp_range": (None, 0),
    "xtc_probability": (None, 0),
    "dry_multiplier": (None, 0),
    "top_n_sigma": (None, -1, 0),
    "adaptive_target": (None, -1),
    "n_indent": (None, 0),
    "post_sampling_probs": (None, False),
    "lora": (None, []),
    "image_data": (None, []),
    "n_cmpl": (None, 1),
    "grammar_lazy": (None, False),
}
"""Fields that are refused, with the values that are no wish."""
_SHARED = ("model", "stream", "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "ignore_eos")
"""Fields that mean the same in a completion body."""
_NEVER = -100.0
"""The bias of a token that never comes."""


def completion_of(body: LlamaCppCompletionBody | InfillBody) -> CompletionBody:
    """The prompt to continue, or the gap to fill.

    Raises:
        GrammarError: The grammar has no rule in the form of GBNF.
    """
    if isinstance(body, InfillBody):
        extra = "".join(f"--- {each.filename or 'snippet'} ---\n{each.text}\n" for each in body.input_extra or ())
        prompt: dict[str, Any] = {
            "prompt": extra + body.input_prefix + (body.prompt or ""),
            "suffix": body.input_suffix,
        }
    else:
        prompt = {"prompt": body.prompt}
    if body.grammar and "::=" not in body.grammar:
        raise GrammarError("grammar must be GBNF: a rule is written name ::= ..., got none", param="grammar")
    return CompletionBody(
        **prompt,
        **{name: getattr(body, name) for name in _SHARED},
        max_tokens=None if body.n_predict in (None, -1, -2) else body.n_predict,
        top_k=None if body.top_k is None else max(0, body.top_k),
        seed=None if body.seed == -1 else body.seed,
        stop=body.stop or None,
        repetition_penalty=body.repeat_penalty,
        logit_bias=_logit_bias(body),
        logprobs=body.n_probs or None,
        return_token_ids=body.return_tokens,
        prompt_cache_options=schema.PromptCacheOptions(mode="explicit") if body.cache_prompt is False else None,
        structured_outputs=schema.StructuredOutputs(grammar=body.grammar) if body.grammar else None,
        guided_json=body.json_schema,
    )


def _logit_bias(body: LlamaCppBody) -> dict[str, float] | None:
    if body.logit_bias is None:
        return None
    pairs = body.logit_bias.items() if isinstance(body.logit_bias, dict) else body.logit_bias
    return {f"{token_id}".removesuffix(".0"): _NEVER if bias is False else bias for token_id, bias in pairs}


class LlamaCppRenderer:
    """Writes one answer; does no I/O. Only `stream` mutates it: it notes line breaks and the end."""

    def __init__(self, task: Task, num_probs: int, report: Report) -> None:
        """Prepare to write an answer with `num_probs` alternatives for each token (0: none); writes nothing yet."""
        self._report = report
        self._model = task.name
        self._tokenizer = task.model.tokenizer
        self._num_probs = num_probs
        self._watch = Stopwatch()
        self._has_new_line = False
        self._end: End | None = None

    def stream(self, index: int, events: Sequence[Event]) -> bytes:
        """An event for the new text."""
        self._watch.note_event()
        text, tokens, token_ids = "", list[Token](), list[int]()
        for event in events:
            match event:
                case Text():
                    text += event.text
                    tokens += event.tokens
                case TokenIds():
                    token_ids += event.token_ids
                case End():
                    self._end = event
        return encode_event(self._answer(text, tokens, token_ids)) if text or tokens or token_ids else b""

    def stream_end(self) -> bytes:
        """The event with counts and timings."""
        assert self._end is not None, "every choice ends"
        return encode_event(self._stopped(self._answer("", [], []), self._end))

    def stream_error(self, error: ApiError) -> bytes:
        """The error as the last event."""
        return b"data: " + llama_cpp_error(error) + b"\n\n"

    def whole(self, choices: Sequence[WholeChoice]) -> bytes:
        """The whole plain answer."""
        (choice,) = choices
        answer = self._answer(choice.text, choice.tokens, choice.token_ids)
        return msgspec.json.encode(self._stopped(answer, choice.end))

    def _answer(self, text: str, tokens: Sequence[Token], token_ids: list[int]) -> LlamaCppAnswer:
        self._has_new_line = self._has_new_line or "\n" in text
        counts = self._report.counts()
        answer = LlamaCppAnswer(
            content=text,
            tokens=token_ids,
            stop=False,
            tokens_predicted=counts.output_tokens,
            tokens_evaluated=counts.prompt_tokens,
        )
        if self._num_probs:
            answer.completion_probabilities = [self._prob(token) for token in tokens if token.part is not Part.CUT]
        return answer

    def _stopped(self, answer: LlamaCppAnswer, end: End) -> LlamaCppAnswer:
        counts, prompt = self._report.counts(), self._report.prompt_of(0).prompt
        is_word = isinstance(end.stop_reason, str)
        answer.stop, answer.model, answer.truncated = True, self._model, False
        answer.prompt = prompt.text or ""
        answer.stop_type = "limit" if end.reason is FinishReason.LENGTH else "word" if is_word else "eos"
        answer.stopping_word = str(end.stop_reason) if is_word else ""
        answer.has_new_line = self._has_new_line
        answer.tokens_cached = counts.prompt_tokens + counts.output_tokens
        prompt_s, output_s = self._watch.read()
        new = counts.prompt_tokens - counts.cached_tokens
        answer.timings = Timings(counts.cached_tokens, *_rates(new, prompt_s), *_rates(counts.output_tokens, output_s))
        return answer

    def _prob(self, token: Token) -> CompletionProb:
        logprobs = token.logprobs
        assert logprobs is not None, "asked for, so the engine reports them"
        pairs = list(zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True))[: self._num_probs]
        top = [TokenProb(*self._spelling(token_id, logprob)) for token_id, logprob in pairs]
        return CompletionProb(*self._spelling(token.token_id, logprobs.logprob), top)

    def _spelling(self, token_id: int, logprob: float) -> tuple[int, str, list[int], float]:
        tokenizer = self._tokenizer
        return (
            token_id,
            tokenizer.token_text(token_id),
            list(tokenizer.token_bytes(token_id)),
            max(logprob, MIN_LOGPROB),
        )


def _rates(num: int, seconds: float) -> tuple[int, float, float, float]:
    """A number of tokens, milliseconds, milliseconds for each, tokens for each second."""
    return num, seconds * 1e3, seconds * 1e3 / max(1, num), num / seconds if seconds else 0.0


router = APIRouter(route_class=AnyTypeRoute)


@router.post("/completion")
async def complete(body: LlamaCppCompletionBody, request: Request, context: Context) -> Response:
    """Continue a prompt, streamed or whole."""
    return await _answer(body, request, context)


@router.post("/infill")
async def infill(body: InfillBody, request: Request, context: Context) -> Response:
    """Write what stands between two texts, streamed or whole."""
    return await _answer(body, request, context)


async def _answer(body: LlamaCppCompletionBody | InfillBody, request: Request, context: ServerContext) -> Response:
    with renaming(RENAMED):
        made = await context.workers.run_light(len(await request.body()), completion_of, body)
        task = await completion_task(made, request, context, sent=body, refused=REFUSED_IN_LLAMA_CPP, is_bounded=False)
        task = replace(task, ignored=[renamed(name, RENAMED) for name in task.ignored], names=RENAMED)
        return await respond(task, request, context, partial(LlamaCppRenderer, task, body.n_probs or 0))
