"""Writes the parts that both endpoints' answers share: ids, finish reasons, usage, prompt, obfuscation."""

import hashlib
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypedDict

import msgspec
from msgspec import UNSET, UnsetType

from weft.engine.wire.messages import EngineInfo, FinishReason, TokenLogprobs
from weft.server.errors import ApiError
from weft.server.generate.events import Part, Report, Token
from weft.server.http.context import VERSION
from weft.server.http.sse import encode_event, error_event
from weft.server.task import schema as wire
from weft.server.task.bodies import TokenLogprob, TopLogprob
from weft.server.task.task import Task
from weft.server.text.text_tokenizer import TextTokenizer

FINISH_WORDS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
"""OpenAI's words. Every other reason has become an error before rendering."""

DONE = b"data: [DONE]\n\n"
"""The last event of every stream, also of one that failed."""

MIN_LOGPROB = -9999.0
"""The log-probability shown for probability zero; JSON has no infinity."""

_OBFUSCATION_BLOCK = 32


def stream_error(error: ApiError) -> bytes:
    """The end of a stream that failed: the error as an event, and the last event."""
    return error_event(error) + DONE


class Envelope(TypedDict):
    """The members that an answer and all its chunks share."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    service_tier: str


@dataclass(frozen=True, slots=True)
class RenderOptions:
    """What the answer shows.

    Attributes:
        logprobs: Number of alternatives per token, requested ids included; None: no logprobs.
        prompt_logprobs: Number of alternatives per prompt token; None: no prompt logprobs.
        usage: The stream ends with a usage chunk.
        usage_on_every_chunk: Each chunk shows the usage so far.
        obfuscation: Chunks are padded, so that their lengths on the wire do not reveal the text.
        transfer: What a whole answer says to the server that continues the prompt, if there is one.
    """

    logprobs: int | None
    prompt_logprobs: int | None
    prompt_text: bool
    token_ids: bool
    usage: bool
    usage_on_every_chunk: bool
    obfuscation: bool
    transfer: wire.KvTransfer | UnsetType = UNSET

    @property
    def only_text_changes(self) -> bool:
        """Whether the chunks between the first and the last of a choice differ only in their text."""
        return self.logprobs is None and not (self.token_ids or self.usage_on_every_chunk or self.obfuscation)


def render_options(body: wire.GenerationBody, logprobs: int | None) -> RenderOptions:
    """Read the options from a body."""
    options, params = body.stream_options, body.kv_transfer_params
    return RenderOptions(
        logprobs=None if logprobs is None else logprobs + len(body.logprob_token_ids or ()),
        prompt_logprobs=body.prompt_logprobs,
        prompt_text=bool(body.return_prompt_text),
        token_ids=bool(body.return_token_ids),
        usage=bool(options and options.include_usage),
        usage_on_every_chunk=bool(options and options.continuous_usage_stats),
        obfuscation=bool(options and options.include_obfuscation),
        transfer=wire.KvTransfer() if params and params.do_remote_decode else UNSET,
    )


class PromptMembers(Protocol):
    """A wire shape that can show the prompt."""

    prompt_token_ids: list[int] | UnsetType
    prompt_text: str | UnsetType


class OpenAIRenderer(ABC):
    """The base of both endpoints' renderers: their common state, and the members that both write."""

    def __init__(self, prefix: str, task: Task, options: RenderOptions, report: Report) -> None:
        """Start an answer: make its id, which has this prefix, and its creation time."""
        self._report = report
        self._options = options
        self._tokenizer = task.model.tokenizer
        self._envelope = Envelope(
            id=f"{prefix}-{secrets.token_hex(16)}",
            created=int(time.time()),
            model=task.name,
            system_fingerprint=_system_fingerprint(task.model.engine_info),
            service_tier=task.service.tier,
        )

    def stream_end(self) -> bytes:
        """The usage event, if the caller asked for it, and the last event."""
        return (encode_event(self._usage_chunk()) if self._options.usage else b"") + DONE

    def stream_error(self, error: ApiError) -> bytes:
        """The error as an event, and the last event."""
        return stream_error(error)

    @abstractmethod
    def _usage_chunk(self) -> msgspec.Struct:
        """The chunk with the usage and no choice."""

    def _usage(self) -> wire.Usage:
        """Usage so far, as OpenAI writes it."""
        counts = self._report.counts()
        return wire.Usage(
            counts.prompt_tokens,
            counts.output_tokens,
            counts.prompt_tokens + counts.output_tokens,
            wire.CachedTokens(counts.cached_tokens, counts.cache_write_tokens),
            wire.OutputTokens(counts.reasoning_tokens, counts.accepted_predictions, counts.rejected_predictions),
        )

    def _chunk_usage(self) -> wire.Usage | UnsetType | None:
        """The usage member of a chunk that is not the last: usage so far, null, or absent."""
        if self._options.usage_on_every_chunk:
            return self._usage()
        return None if self._options.usage else UNSET

    def _obfuscation(self, text: str) -> str | UnsetType:
        return obfuscation(text) if self._options.obfuscation else UNSET

    def _add_prompt(self, shape: PromptMembers, index: int = 0) -> None:
        """Add the prompt of a choice as ids and as text, each if requested. The text includes control tokens."""
        token_ids = self._report.prompt_of(index).prompt.token_ids
        if self._options.token_ids:
            shape.prompt_token_ids = token_ids
        if self._options.prompt_text:
            shape.prompt_text = self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def _prompt_logprobs(self, index: int = 0) -> wire.PromptLogprobs | UnsetType:
        """For each position of the prompt: the alternatives and the token itself."""
        count, report = self._options.prompt_logprobs, self._report.prompt_of(index)
        if count is None:
            return UNSET
        pairs = zip(report.prompt.token_ids[1:], report.logprobs or (), strict=True)
        return [None, *(self._prompt_logprob(token_id, entry, count) for token_id, entry in pairs)]

    def _prompt_logprob(self, token_id: int, entry: TokenLogprobs, count: int) -> dict[int, wire.PromptLogprob]:
        ranks = {other_id: rank for rank, other_id in enumerate(entry.top_token_ids, 1)}
        logprobs = {token_id: entry.logprob, **dict(zip(entry.top_token_ids[:count], entry.top_logprobs, strict=False))}
        return {
            i: wire.PromptLogprob(max(logprob, MIN_LOGPROB), ranks.get(i), self._tokenizer.token_text(i))
            for i, logprob in logprobs.items()
        }


def shown_tokens(tokens: Sequence[Token], num_top: int, tokenizer: TextTokenizer) -> list[TokenLogprob]:
    """The tokens that are part of the text, with their log-probabilities and so many alternatives."""

    def spelling(token_id: int, logprob: float) -> tuple[str, float, list[int]]:
        return tokenizer.token_text(token_id), max(logprob, MIN_LOGPROB), list(tokenizer.token_bytes(token_id))

    shown = []
    for token in (token for token in tokens if token.part is Part.TEXT):
        logprobs = token.logprobs
        assert logprobs is not None, "asked for, so the engine reports them"
        pairs = zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True)
        top = [TopLogprob(*spelling(*pair)) for pair in pairs][:num_top]
        shown.append(TokenLogprob(*spelling(token.token_id, logprobs.logprob), top))
    return shown


def obfuscation(text: str) -> str:
    """Random text that pads the length of a delta's text to a multiple of 32."""
    length = -len(text.encode("utf-8", "replace")) % _OBFUSCATION_BLOCK
    return secrets.token_urlsafe(_OBFUSCATION_BLOCK)[:length]


def _system_fingerprint(info: EngineInfo) -> str:
    """A value that changes if the same request may get a different answer: version, model, arithmetic."""
    parts = (VERSION, info.architecture, str(info.vocab_size), info.device, info.dtype, info.attention_backend)
    return "fp_" + hashlib.blake2s("|".join(parts).encode(), digest_size=5).hexdigest()
