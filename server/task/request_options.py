"""What a request asks for besides sampling and text: cache, shared blocks, tier, deadline, beam search.

Each part reads its fields of the body, checks them, and returns what the task holds or the engine takes.

- `prompt_cache_options`, `prompt_cache_breakpoint`: in mode implicit, blocks are shared by content automatically. In
  mode explicit, a request without a breakpoint neither reads nor writes the cache. In both modes, a breakpoint pins the
  prompt up to the end of its part for a limited time.
- `kv_transfer_params`: one server computes a prompt, another one continues it. The blocks go through the folder that
  both share, and are found there by their content. So the servers need to tell each other nothing about where blocks
  are, and any server that shares the folder may continue the prompt.
- `service_tier`, `priority`: who is served before others.
- `use_beam_search`: the engine does the search. It returns whole choices at the end, best first.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request

from weft.engine.wire.messages import TIER_WIDTH, BeamOptions, EngineInfo, Pin
from weft.engine.wire.params import BACKGROUND, MAX_BEAMS
from weft.server.errors import InvalidRequestError, shown
from weft.server.http.auth import is_of_batch
from weft.server.models.seq2seq import NOT_ENCODED, Encoded, is_of_input, language_id, refuse_to_continue
from weft.server.models.served_model import ServedModel
from weft.server.settings import EVERYBODY, Settings
from weft.server.task.bodies import ContentPart, Message
from weft.server.task.messages import PART_SEPARATOR
from weft.server.task.parts import Spans, part_text
from weft.server.task.schema import GenerationBody, PromptCacheOptions
from weft.server.task.validation import check_range

TTLS_S = {"30m": 1800.0, "12h": 43200.0}
DEFAULT_TTL = "30m"
MAX_BREAKPOINTS = 4
"""If there are more, the last ones count."""

_MARKS = "\U0010fffa\U0010fffb\U0010fffc\U0010fffd"
"""One character for each breakpoint, used in this file only. They have no meaning to templates and tokenizers."""
_WITHOUT_MARKS = dict.fromkeys(map(ord, _MARKS))


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """The end of a part: its message, characters of content up to it, and how long the prompt up to it is kept."""

    message: int
    num_chars: int
    ttl_s: float


def find_breakpoints(messages: Sequence[Message], options: PromptCacheOptions | None) -> list[Breakpoint]:
    """The last breakpoints, in order.

    Raises:
        InvalidRequestError: A ttl is not one of the known ones.
    """
    usual_s, text, found = usual_ttl_s(options), partial(part_text, spans=Spans()), list[Breakpoint]()
    for i, message in enumerate(messages):
        if isinstance(message.content, list):
            found += content_breakpoints(i, message.content, usual_s, f"messages[{i}].content", text)
    return found[-MAX_BREAKPOINTS:]


def content_breakpoints(
    message: int, parts: Sequence[ContentPart], usual_s: float, at: str, text: Callable[[Any, str], str | None]
) -> list[Breakpoint]:
    """The breakpoints of a message's parts.

    Args:
        usual_s: How long one without a ttl lasts.
        at: The path of the content.
        text: What stands for a part, see `part_text`.
    """
    found, num_chars = list[Breakpoint](), 0
    if not any(part.prompt_cache_breakpoint for part in parts):
        return found
    for i, part in enumerate(parts):
        num_chars += len(text(part, f"{at}[{i}]") or "")
        if (given := part.prompt_cache_breakpoint) is not None:
            ttl_s = _ttl_s(given.ttl, f"{at}[{i}].prompt_cache_breakpoint.ttl") or usual_s
            found.append(Breakpoint(message, num_chars, ttl_s))
        num_chars += len(PART_SEPARATOR)
    return found


def usual_ttl_s(options: PromptCacheOptions | None) -> float:
    """How long a breakpoint without a ttl of its own lasts."""
    return _ttl_s(options.ttl if options else None, "prompt_cache_options.ttl") or TTLS_S[DEFAULT_TTL]


def uses_cache(options: PromptCacheOptions | None) -> bool:
    """Whether the cache is used even without a breakpoint.

    Raises:
        InvalidRequestError: The ttl is not one of the known ones.
    """
    if options is None:
        return True
    _ttl_s(options.ttl, "prompt_cache_options.ttl")
    return options.mode != "explicit"


def marked(messages: Sequence[dict[str, Any]], breakpoints: Sequence[Breakpoint]) -> list[dict[str, Any]]:
    """The messages with a mark at each breakpoint, in front of white space there, which a template may strip."""
    result = list(messages)
    for mark, at in reversed([*zip(_MARKS, breakpoints, strict=False)]):  # last first: earlier positions stay valid
        message = result[at.message]
        content = message["content"]
        end = len(content[: at.num_chars].rstrip())
        result[at.message] = {**message, "content": content[:end] + mark + content[end:]}
    return result


def find_pins(
    breakpoints: Sequence[Breakpoint],
    token_ids: Sequence[int],
    rendered: Sequence[str],
    encode: Callable[[list[str]], list[int]],
) -> list[Pin]:
    """Find the breakpoints among the prompt's ids.

    The prompt itself is rendered without marks, so that marks cannot change it. A pin covers the ids that both
    renderings share up to the mark. If the template does not show the mark, the pin covers the whole prompt.

    Args:
        rendered: The template's output for the marked messages, in the pieces that `encode` takes.
    """
    pins = []
    for mark, at in zip(_MARKS, breakpoints, strict=False):
        other_ids = encode(_beginning(rendered, mark))
        pairs = enumerate(zip(token_ids, other_ids, strict=False))
        num_common = next((i for i, (ours, other) in pairs if ours != other), min(len(token_ids), len(other_ids)))
        pins.append(Pin(num_common, at.ttl_s))
    return pins


def _beginning(rendered: Sequence[str], mark: str) -> list[str]:
    """The rendered text up to and including a mark, at which its ids begin to differ from the prompt's."""
    pieces: list[str] = []
    for piece in rendered:
        head, found, _ = piece.partition(mark)
        pieces.append(head.translate(_WITHOUT_MARKS) + found)
        if found:
            break
    return pieces


def _ttl_s(ttl: str | None, path: str) -> float | None:
    """The ttl in seconds; None if there is none."""
    if ttl is not None and ttl not in TTLS_S:
        raise InvalidRequestError(f"{path} must be one of {', '.join(TTLS_S)}, got {shown(ttl)}", param=path)
    return None if ttl is None else TTLS_S[ttl]


def stores_prompt(body: GenerationBody, engine: EngineInfo) -> bool:
    """Whether another server waits for the blocks of the prompt.

    Raises:
        InvalidRequestError: The engine shares no folder, or the request makes no blocks that could be shared.
    """
    params = body.kv_transfer_params
    for name in ("do_remote_decode", "do_remote_prefill"):
        if engine.kv_role == "none" and getattr(params, name, None):
            path = f"kv_transfer_params.{name}"
            raise InvalidRequestError(f"{path} needs a server with a kv_role, which shares its blocks", param=path)
    if params is None or not params.do_remote_decode:
        return False
    if params.do_remote_prefill or not uses_cache(body.prompt_cache_options):
        other = "kv_transfer_params.do_remote_prefill" if params.do_remote_prefill else "prompt_cache_options.mode"
        path = "kv_transfer_params.do_remote_decode"
        raise InvalidRequestError(f"{path} cannot be used with this {other}", param=path)
    return True


def salt_of(body: GenerationBody) -> str:
    """The salt of a request's blocks; that of another server's request if this one is made for it."""
    if body.kv_transfer_params is not None and body.kv_transfer_params.cache_salt is not None:
        return body.kv_transfer_params.cache_salt
    return body.cache_salt or ""


_TIER_CLASSES = {"priority": -1, "default": 0, "flex": 1}
_TIER_ALIASES = {"auto": "default", "scale": "default", "fast": "priority"}


@dataclass(frozen=True, slots=True)
class Service:
    """How a request is served: the tier that the answer reports, and the priority that the engine orders by."""

    tier: str
    priority: int


def service_of(request: Request, body: GenerationBody, settings: Settings) -> Service:
    """Decide how a request is served: map its tier to a priority. A lower number is served earlier.

    `priority` orders requests within a tier, and is limited to 31 bits and a sign. Two values put a request before
    those of others: the tier `priority`, and a negative `priority`. Only keys in the setting `priority_keys` may use
    them. For other keys, the tier becomes `default`, as OpenAI does it, and the answer says so. A negative `priority`
    is refused, because no field of the answer could report the change.

    Raises:
        InvalidRequestError: `priority` is negative, and the API key may not go first.
    """
    may_go_first = _may_go_first(request, settings)
    priority = body.priority or 0
    if priority < 0 and not may_go_first:
        message = f"priority must be at least 0 unless the API key is among priority_keys, got {priority}"
        raise InvalidRequestError(message, param="priority")
    asked = body.service_tier or "auto"
    tier = _TIER_ALIASES.get(asked, asked)
    if tier == "priority" and not may_go_first:
        tier = "default"
    if is_of_batch(request):
        return Service("default", BACKGROUND + max(priority, 0))
    return Service(tier, _TIER_CLASSES[tier] * TIER_WIDTH + priority)


def _may_go_first(request: Request, settings: Settings) -> bool:
    if EVERYBODY in settings.priority_keys:
        return True
    key = getattr(request.state, "api_key", None)
    return key is not None and key.encode("latin-1").decode() in settings.priority_keys  # the key's bytes are UTF-8


def deadline_of(request: Request, *, is_stream: bool, ping_s: float) -> float | None:
    """When the client will have given up, on the clock of `time.monotonic`; None if that is not known.

    SDKs send how long they wait for the next byte. Keep-alive comments in a stream count as bytes, so a stream has no
    deadline if they come often enough.
    """
    try:
        timeout_s = float(request.headers.get("x-stainless-read-timeout", "nan"))
    except ValueError:
        return None
    if not 0 < timeout_s < 1e9 or (is_stream and 0 < ping_s < timeout_s):
        return None
    return time.monotonic() + timeout_s


_MAX_PRIORITY = 2**31 - 1

_NEUTRAL_IN_BEAM_SEARCH: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(("stop", "logprob_token_ids"), ([],)),
    **dict.fromkeys(("prompt_logprobs", "suffix"), ()),
    **dict.fromkeys(("stream", "echo", "prewarm"), (False,)),
    "temperature": (0, 1),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
}
"""Fields that a beam search cannot honour, each with its neutral values: it samples nothing, and runs to the end."""


def check_common(body: GenerationBody, max_n: int) -> None:
    """Check the fields that all generating endpoints share and that concern neither sampling nor text."""
    if body.n is not None:
        check_range("n", body.n, 1, max_n)
    if body.priority is not None:
        check_range("priority", body.priority, -_MAX_PRIORITY, _MAX_PRIORITY)
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("stream_options is only allowed when stream is true", param="stream_options")


def beam_options(body: GenerationBody) -> BeamOptions | None:
    """Read the options of a body; None if it asks for no beam search.

    Raises:
        InvalidRequestError: A field cannot be used with beam search, or an option of beam search is given without it.
    """
    if not body.use_beam_search:
        for name, neutral in (("length_penalty", 1.0), ("early_stopping", False)):
            if getattr(body, name) not in (None, neutral):
                raise InvalidRequestError(f"{name} is only allowed when use_beam_search is true", param=name)
        return None
    neutral_values = {**_NEUTRAL_IN_BEAM_SEARCH, "best_of": (1 if body.n is None else body.n,)}
    for name, values in neutral_values.items():
        value = getattr(body, name, None)
        if value is not None and value not in values:
            raise InvalidRequestError(f"{name} cannot be used with use_beam_search, got {shown(value)}", param=name)
    if body.n is not None and body.n > MAX_BEAMS:
        raise InvalidRequestError(f"n must be at most {MAX_BEAMS} with use_beam_search, got {body.n}", param="n")
    length_penalty = 1.0 if body.length_penalty is None else body.length_penalty
    if not -10.0 <= length_penalty <= 10.0:
        message = f"length_penalty must be between -10 and 10, got {length_penalty}"
        raise InvalidRequestError(message, param="length_penalty")
    return BeamOptions(length_penalty, body.early_stopping or False)


def read_encoded(body: GenerationBody, model: ServedModel, *, may_search: bool) -> Encoded:
    """Read what a request asks of a model with an encoder; NOT_ENCODED for another model.

    Args:
        may_search: Whether the search of the checkpoint may be run where the body asks for nothing else.

    Raises:
        InvalidRequestError: The tokenizer has no such language, or the model no encoder.
    """
    ids = []
    for param, name in (("source_language", body.source_language), ("target_language", body.target_language)):
        if name is not None and not model.seq2seq:
            raise InvalidRequestError(f"{param} is only allowed for a model with an encoder", param=param)
        ids.append(None if name is None else language_id(model.tokenizer, name, param))
    if (seq2seq := model.seq2seq) is None:
        return NOT_ENCODED
    refuse_to_continue(getattr(body, "continue_final_message", None))
    source, target = ids
    if source is not None and is_of_input(model.tokenizer, source):
        message = f"source_language: this model takes a target_language only, got {shown(body.source_language)}"
        raise InvalidRequestError(message, param="source_language")
    if target is not None and is_of_input(model.tokenizer, target):
        source, target = target, None
    if source is not None and body.truncate_prompt_tokens is not None:
        name = "truncate_prompt_tokens"
        raise InvalidRequestError(f"{name} cannot be used with a language in the input, which it may cut", param=name)
    begin = seq2seq.begin_in(target, model.tokenizer)
    # Without a temperature these models do not sample, so 1 is a wish.
    neutral = {**_NEUTRAL_IN_BEAM_SEARCH, "temperature": (0,), "stream": (False, True)}
    may_search &= all(getattr(body, name, None) in (None, *values) for name, values in neutral.items())
    is_own = may_search and body.use_beam_search is None
    return Encoded(begin, source, seq2seq, seq2seq.beams(begin, body.n or 1) if is_own else None)
