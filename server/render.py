"""What the answers of both endpoints have in common: ids, finish reasons, usage, the prompt, obfuscation."""

import hashlib
import secrets
import time
from dataclasses import dataclass
from typing import TypedDict

from msgspec import UNSET, UnsetType

from engine.protocol import EngineInfo, FinishReason
from server.context import VERSION
from server.generate.events import Report
from server.request.task import Task
from server.schemas.common import CachedTokens, GenerationBody, OutputTokens, Usage

FINISH_WORDS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
"""OpenAI's words; every other reason is an error before it gets here."""

MIN_LOGPROB = -9999.0
"""What stands for a probability of zero, for JSON has no infinity."""

_OBFUSCATION_BLOCK = 32


class Envelope(TypedDict):
    """The members that are the same in an answer and in each of its chunks."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    service_tier: str


def new_envelope(prefix: str, task: Task) -> Envelope:
    """An envelope for an answer that begins now."""
    return Envelope(
        id=f"{prefix}-{secrets.token_hex(16)}",
        created=int(time.time()),
        model=task.name,
        system_fingerprint=_system_fingerprint(task.model.engine_info),
        service_tier=task.service.tier,
    )


@dataclass(frozen=True, slots=True)
class RenderOptions:
    """What the caller wants to see.

    Attributes:
        logprobs: Alternatives per token to show, ids that were asked for included; None shows no logprobs.
        prompt_logprobs: Alternatives per prompt token to show; None shows none of the prompt's.
        usage: End the stream with a usage chunk.
        usage_on_every_chunk: Show usage so far on each chunk.
        obfuscation: Pad chunks, so that their lengths on the wire do not give the text away.
    """

    logprobs: int | None
    prompt_logprobs: int | None
    prompt_text: bool
    token_ids: bool
    usage: bool
    usage_on_every_chunk: bool
    obfuscation: bool

    @property
    def only_text_changes(self) -> bool:
        """Whether the chunks between the first and the last of a choice differ in nothing else."""
        return self.logprobs is None and not (self.token_ids or self.usage_on_every_chunk or self.obfuscation)


def render_options(body: GenerationBody, logprobs: int | None) -> RenderOptions:
    """Read the options from a body."""
    options = body.stream_options
    return RenderOptions(
        logprobs=None if logprobs is None else logprobs + len(body.logprob_token_ids or ()),
        prompt_logprobs=body.prompt_logprobs,
        prompt_text=bool(body.return_prompt_text),
        token_ids=bool(body.return_token_ids),
        usage=bool(options and options.include_usage),
        usage_on_every_chunk=bool(options and options.continuous_usage_stats),
        obfuscation=bool(options and options.include_obfuscation),
    )


def usage(report: Report) -> Usage:
    """Usage so far, as OpenAI writes it."""
    counts = report.counts()
    return Usage(
        counts.prompt_tokens,
        counts.output_tokens,
        counts.prompt_tokens + counts.output_tokens,
        CachedTokens(counts.cached_tokens, counts.cache_write_tokens),
        OutputTokens(counts.reasoning_tokens, counts.accepted_predictions, counts.rejected_predictions),
    )


def chunk_usage(options: RenderOptions, report: Report) -> Usage | UnsetType | None:
    """The usage member of a chunk that is not the last: so far, null, or absent."""
    if options.usage_on_every_chunk:
        return usage(report)
    return None if options.usage else UNSET


def obfuscation(options: RenderOptions, text: str) -> str | UnsetType:
    """Random text that brings the length of a delta's text up to a multiple of 32."""
    if not options.obfuscation:
        return UNSET
    length = -len(text.encode("utf-8", "replace")) % _OBFUSCATION_BLOCK
    return secrets.token_urlsafe(_OBFUSCATION_BLOCK)[:length]


def _system_fingerprint(info: EngineInfo) -> str:
    """Changes when the same request might be answered in other words: version, model, arithmetic."""
    parts = (VERSION, info.architecture, str(info.vocab_size), info.device, info.dtype, info.attention_backend)
    return "fp_" + hashlib.blake2s("|".join(parts).encode(), digest_size=5).hexdigest()
