"""Decides which body fields are refused and which are reported as ignored. None is dropped silently.

Every field is one of four kinds:

- honoured: declared in a schema and used
- accepted: declared, validated, and reported in the header `x-ignored-params`
- refused: named here; 400 if its value asks for something
- unknown: reported; 400 if parameters are strict
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote

from pydantic import BaseModel

from weft.server.errors import UnknownParameterError, UnsupportedParameterError, shown
from weft.server.request.validation import dotted_path

MAX_REPORTED = 32
"""Most names in the header. Proxies limit its length."""

_NOTHING: tuple[object, ...] = (None,)

REFUSED_EVERYWHERE: Mapping[str, tuple[object, ...]] = {
    "moderation": _NOTHING,
    **{f"kv_transfer_params.remote_{name}": _NOTHING for name in ("engine_id", "block_ids", "host", "port")},
}
"""Fields that are known but not honoured, each with the values that ask for nothing."""

REFUSED_IN_CHAT: Mapping[str, tuple[object, ...]] = {
    **REFUSED_EVERYWHERE,
    "reasoning": _NOTHING,
    "chat_template": _NOTHING,
    "echo": (None, False),
    "best_of": (None, 1),
    "modalities": (None, ["text"]),
    "audio": _NOTHING,
    "web_search_options": _NOTHING,
}

REFUSED_IN_COMPLETIONS: Mapping[str, tuple[object, ...]] = {
    **REFUSED_EVERYWHERE,
    "prediction": _NOTHING,
    "thinking_token_budget": _NOTHING,
    "reasoning_budget_tokens": _NOTHING,
}
REFUSED_IN_RESPONSES: Mapping[str, tuple[object, ...]] = {
    **REFUSED_EVERYWHERE,
    "prompt": _NOTHING,
    "prompt_cache_options.comparison_response_id": _NOTHING,
    "access_programs": _NOTHING,
    "image": _NOTHING,
    "context_management": (None, []),
    "background_options": _NOTHING,
    "messages": _NOTHING,
    "response_format": _NOTHING,
    "reasoning_effort": _NOTHING,
    "max_tokens": _NOTHING,
    "max_completion_tokens": _NOTHING,
    "n": (None, 1),
    "prewarm": (None, False),
    "kv_transfer_params": _NOTHING,
    "prompt_logprobs": _NOTHING,
    "logprob_token_ids": _NOTHING,
    "return_token_ids": (None, False),
    "return_prompt_text": (None, False),
    "use_beam_search": (None, False),
    "length_penalty": _NOTHING,
    "early_stopping": _NOTHING,
    "truncate_prompt_tokens": _NOTHING,
    "stream_options.continuous_usage_stats": (None, False),
}
REFUSED_IN_COMPACT: Mapping[str, tuple[object, ...]] = {
    "conversation": _NOTHING,
    "image": _NOTHING,
    "stream": (None, False),
    "prompt_cache_options.prewarm": (None, False),
}
REFUSED_IN_SGLANG_DECISIONS: Mapping[str, tuple[object, ...]] = {
    "images": (None, []),
    "return_prompt_token_ids": (None, False),
}
REFUSED_IN_SYSTEMONE: Mapping[str, tuple[object, ...]] = {
    **REFUSED_IN_SGLANG_DECISIONS,
    "temperature": _NOTHING,
    "prompt_format_version": _NOTHING,
}
REFUSED_IN_TOKENIZE: Mapping[str, tuple[object, ...]] = {"chat_template": REFUSED_IN_CHAT["chat_template"]}

_ASKING_FOR_NOTHING: Mapping[str, tuple[object, ...]] = {"store": (None, False)}
ACCEPTED = frozenset(
    {
        *("user", "safety_identifier", "prompt_cache_retention", "metadata", "store", "verbosity", "keep_alive"),
        *("input[].id", "input[].namespace", "input[].phase", "input[].status"),
    }
)
"""Fields that are validated and reported but have no effect."""
ACCEPTED_IN_RESPONSES = frozenset(
    {
        "user",
        "safety_identifier",
        "prompt_cache_retention",
        "text.verbosity",
        "reasoning.summary",
        "reasoning.generate_summary",
        "reasoning.mode",
    }
)


def ignored_fields(
    body: BaseModel,
    refused: Mapping[str, tuple[object, ...]],
    *,
    strict: bool,
    accepted: Collection[str] = ACCEPTED,
) -> list[str]:
    """Return the dotted names of the fields of this body that have no effect.

    Args:
        refused: Names that are refused on this route, with the values that ask for nothing.
        accepted: Fields that have no effect on this route.

    Raises:
        UnsupportedParameterError: A refused field asks for something.
        UnknownParameterError: A field is unknown and `strict` is set.
    """
    ignored: list[str] = []
    for at, generic, value, is_extra in _walk(body, (), ""):
        if generic in refused:
            if value not in refused[generic]:
                path = dotted_path(at)
                raise UnsupportedParameterError(
                    f"{path} is not supported by this server, got {shown(value)}", param=path
                )
        elif is_extra and strict:
            path = dotted_path(at)
            raise UnknownParameterError(f"unknown parameter: {path}", param=path)
        elif (is_extra or generic in accepted) and value not in _ASKING_FOR_NOTHING.get(generic, _NOTHING):
            ignored.append(dotted_path(at))
    return ignored


def ignored_header(ignored: Iterable[str]) -> dict[str, str]:
    """The `x-ignored-params` header, or no header. The names are the caller's text, so they are escaped."""
    names = [quote(name[:64], safe="[]._-", errors="replace")[:64] for name in list(ignored)[:MAX_REPORTED]]
    return {"x-ignored-params": ",".join(names)} if names else {}


def _walk(
    model: BaseModel, at: tuple[str | int, ...], generic: str
) -> Iterator[tuple[tuple[str | int, ...], str, Any, bool]]:
    """Yield (steps, path without indices, value, whether the schema does not know it) for every field that was sent."""
    prefix = f"{generic}." if generic else ""
    for name, value in (model.model_extra or {}).items():
        yield (*at, name), prefix + name, value, True
    for field, info in type(model).model_fields.items():  # in the schema's order; a set's order varies
        if field not in model.model_fields_set:
            continue
        name, value = info.alias or field, getattr(model, field)
        yield (*at, name), prefix + name, value, False
        if isinstance(value, BaseModel):
            yield from _walk(value, (*at, name), prefix + name)
        elif isinstance(value, list) and value and isinstance(value[0], BaseModel):  # then all items are
            for i, item in enumerate(value):
                yield from _walk(item, (*at, name, i), f"{prefix}{name}[]")
