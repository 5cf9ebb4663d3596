"""Checks the fields of a body: errors name the field, the bound and the value, and no field is dropped silently.

Pydantic's errors become one `InvalidRequestError`. Lone surrogates, which JSON can write but tokenizers, messages and
answers cannot hold, are refused in any member. Every field is one of four kinds:

- honoured: declared in a schema and used
- accepted: declared, validated, and reported in the header `x-ignored-params`
- refused: named here; 400 if its value asks for something
- unknown: reported; 400 if parameters are strict
"""

import logging
import re
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, islice
from typing import Any, TypeVar
from urllib.parse import quote

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel

from weft.server import errors
from weft.server.models.served_model import ServedModel

_log = logging.getLogger(__name__)
T = TypeVar("T")


def as_invalid_request(found: Sequence[Any], body: object) -> errors.InvalidRequestError:
    """Turn pydantic's errors for one body into the error for the client.

    Of several errors, the one deepest in the body is reported: it is closest to what the caller meant.
    """
    paths = [_steps(error, body) for error in found]
    deepest = max(range(len(found)), key=lambda i: (len(paths[i]), -i))
    return _describe(found[deepest], dotted_path(paths[deepest]))


def _steps(error: Any, body: Any) -> list[str | int]:
    """The steps of a location that exist in the body. The name of a missing field is kept at the end.

    The others are union tags, which a pydantic location holds beside keys and indices.
    """
    steps: list[str | int] = []
    location = error["loc"]
    for position, step in enumerate(location):
        is_key = isinstance(body, dict) and step in body
        is_index = isinstance(body, list) and isinstance(step, int) and step < len(body)
        if is_key or is_index:
            body = body[step]
            steps.append(step)
        elif error["type"] == "missing" and position == len(location) - 1:
            steps.append(step)
    return steps


def _describe(error: Any, path: str) -> errors.InvalidRequestError:
    if error["type"] == "missing":
        return errors.InvalidRequestError(f"{path} is required", param=path)
    text = error["msg"][0].lower() + error["msg"][1:]
    is_type = error["type"].endswith(("_type", "_parsing", "int_from_float", "tag_not_found"))
    kind = errors.InvalidTypeError if is_type else errors.InvalidRequestError
    return kind(f"{path or 'the body'}: {text}, got {errors.shown(error['input'])}", param=path or None)


def as_missing_body(exc: RequestValidationError) -> errors.MalformedBodyError:
    """The error for a body that was not parsed."""
    if exc.body is None:
        return errors.MalformedBodyError("the body is empty; a JSON object is needed")
    return errors.MalformedBodyError("the body was not read: the Content-Type header must be application/json")


def dotted_path(steps: Sequence[str | int]) -> str:
    """Write ("messages", 2, "content") as messages[2].content. Long names are cut, because callers can invent them."""
    path = ""
    for step in steps:
        if isinstance(step, str):
            name = step if len(step) <= errors.MAX_VALUE_CHARS else step[: errors.MAX_VALUE_CHARS] + "..."
            path += f".{name}" if path else name
        else:
            path += f"[{step}]"
    return path


def renamed(path: str, names: Mapping[str, str]) -> str:
    """A path in the body of another API. `names` maps patterns of the path here to what they are there."""
    for pattern, name in names.items():
        path = re.sub(pattern, name, path)
    return path


@contextmanager
def renaming(names: Mapping[str, str]) -> Generator[None, None, None]:
    """Let errors name the fields of the body that was sent, from which this API's own was made."""
    try:
        yield
    except errors.ApiError as error:
        if error.param:
            old, error.param = error.param, renamed(error.param, names)
            error.message = error.message.replace(old, error.param)
        raise


def required(value: T | None, path: str) -> T:
    """Return the value of the field at `path`.

    Raises:
        InvalidRequestError: It has no value.
    """
    if value is None:
        raise errors.InvalidRequestError(f"{path} is required", param=path)
    return value


def check_range(name: str, value: int, low: int, high: int | None, *, param: str | None = None) -> int:
    """Check that low <= value <= high, and return the value. `param` is the field if `name` is not its name.

    Raises:
        InvalidRequestError: The value is out of range.
    """
    if value < low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"between {low} and {high}"
        raise errors.InvalidRequestError(f"{name} must be {bound}, got {errors.shown(value)}", param=param or name)
    return value


def check_token_ids(token_ids: Sequence[int], vocab_size: int, name: str) -> None:
    """Check token ids that a caller sent.

    Raises:
        InvalidRequestError: An id is not in the vocabulary.
    """
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        i = next(i for i, token_id in enumerate(token_ids) if not 0 <= token_id < vocab_size)
        message = f"{name}[{i}] must be a token id between 0 and {vocab_size - 1}, got {token_ids[i]}"
        raise errors.InvalidRequestError(message, param=f"{name}[{i}]")


_SURROGATE_STARTS = (b"\\ud", b"\\uD", b"\xed")
"""What lone surrogates begin with; so do characters that are written as pairs of escapes, and some of Korean."""
_SURROGATE = re.compile("[\ud800-\udfff]")


def check_utf8(data: bytes, value: object, spoken: Collection[str] = ()) -> None:
    """Check the value that was parsed from `data`. It is looked at only if the bytes can hold a lone surrogate.

    Args:
        spoken: Members of the body that hold a conversation. Clients that cut texts leave halves of characters in it;
            they become U+FFFD, in place, and are noted in the log.

    Raises:
        InvalidTypeError: There is one elsewhere, or in a name; the error names the first place.
    """
    if not any(start in data for start in _SURROGATE_STARTS):
        return
    places: list[tuple[Any, Any, object]] = [(None, None, value)]  # each with its steps, last first, and what holds it
    while places:
        at, holder, here = places.pop()
        if isinstance(here, list | dict):
            items = list(here.items() if isinstance(here, dict) else enumerate(here))
            places += [((step, at), here, inner) for step, inner in reversed(items)]
        in_name, in_text = _has_surrogate(at and at[0]), _has_surrogate(here)
        if not (in_name or in_text):
            continue
        path = _path(at).encode("utf-8", "replace").decode()
        if in_name or path.partition(".")[0].partition("[")[0] not in spoken:
            raise errors.InvalidTypeError(f"{path}: input should be text without lone surrogates", param=path)
        holder[at[0]] = _SURROGATE.sub("\ufffd", holder[at[0]])
        note_left_out([f"half a character in {path}"])


def _has_surrogate(text: object) -> bool:
    return isinstance(text, str) and not text.isascii() and _SURROGATE.search(text) is not None


def _path(at: Any) -> str:
    steps: list[str | int] = []
    while at is not None:
        step, at = at
        steps.append(step)
    return dotted_path(steps[::-1])


MAX_REPORTED = 32
MAX_REPORTED_CHARS = 2048
"""Most names in the header, and their length together. Proxies limit it."""

NOTHING: tuple[object, ...] = (None,)
OFF: tuple[object, ...] = (None, False)
Refused = Mapping[str, tuple[object, ...]]
"""Fields that are known but not honoured, each with the values that ask for nothing."""

REFUSED_EVERYWHERE: Refused = {
    "moderation": NOTHING,
    **{f"kv_transfer_params.remote_{name}": NOTHING for name in ("engine_id", "block_ids", "host", "port")},
}


_ASKING_FOR_NOTHING: Refused = {"store": (None, False)}
ACCEPTED = frozenset(
    {
        *("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "metadata", "store", "verbosity"),
        "keep_alive",
        *("input[].id", "input[].namespace", "input[].phase", "input[].status"),
    }
)
"""Fields that are validated and reported but have no effect."""


def ignored_fields(
    body: BaseModel, refused: Refused, *, strict: bool, accepted: Collection[str] = ACCEPTED
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
                message = f"{path} is not supported by this server, got {errors.shown(value)}"
                raise errors.UnsupportedParameterError(message, param=path)
        elif is_extra and strict:
            path = dotted_path(at)
            raise errors.UnknownParameterError(f"unknown parameter: {path}", param=path)
        elif (is_extra or generic in accepted) and value not in _ASKING_FOR_NOTHING.get(generic, NOTHING):
            ignored.append(dotted_path(at))
    return ignored


_noted: set[str] = set()
_MAX_NOTED = 256
"""Most kinds of things that are named in the log."""


def note_left_out(names: Iterable[str]) -> None:
    """Say once in the log what does not reach the model, each kind of it (a path without indices)."""
    kinds = {re.sub(r"\[\d+\]", "[]", name)[: errors.MAX_VALUE_CHARS] for name in names}
    for kind in sorted(kinds - _noted):
        if len(_noted) < _MAX_NOTED:
            _noted.add(kind)
            _log.info("Left out of a prompt: %s", ascii(kind)[1:-1])


def ignored_header(ignored: Iterable[str]) -> dict[str, str]:
    """The `x-ignored-params` header, or no header. The names are the caller's text, so they are escaped."""
    names = [quote(name[:128], safe="[]._-$=", errors="replace")[:128] for name in islice(ignored, MAX_REPORTED)]
    lengths = accumulate(len(name) + 1 for name in names)
    names = [name for name, length in zip(names, lengths, strict=True) if length <= MAX_REPORTED_CHARS]
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


_INSTEAD = {
    "embed": ": it makes vectors, at /v1/embeddings",
    "classify": ": it scores texts, at /v1/classify and /v1/rerank",
}
_TO_SPEECH = "this route needs a model that reads text, and {} turns speech into text, at /v1/audio/transcriptions"


def require_task(model: ServedModel, *tasks: str) -> None:
    """Check that the model is for one of these tasks.

    Raises:
        UnsupportedValueError: It is for something else.
    """
    own = model.engine_info.task
    if own not in tasks:
        wanted = " or ".join(tasks)
        message = f"this route needs a model for the task {wanted}, and the task of {model.name} is {own}"
        message += _INSTEAD.get(own, "")
        raise errors.UnsupportedValueError(message, param="model")
    if model.engine_info.audio is not None:
        raise errors.UnsupportedValueError(_TO_SPEECH.format(model.name), param="model")
