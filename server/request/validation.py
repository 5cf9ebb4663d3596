"""Turns pydantic's errors into one `InvalidRequestError` that names the field, the bound and the value.

A pydantic location holds union tags beside keys and indices. Only the steps that exist in the body become part of the
path. Of several errors, the one deepest in the body is reported: it is closest to what the caller meant.
"""

import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from fastapi.exceptions import RequestValidationError

from weft.server.errors import (
    MAX_VALUE_CHARS,
    ApiError,
    InvalidRequestError,
    InvalidTypeError,
    MalformedBodyError,
    shown,
)

T = TypeVar("T")


def as_invalid_request(errors: Sequence[Any], body: object) -> InvalidRequestError:
    """Turn pydantic's errors for one body into the error for the client."""
    paths = [_steps(error, body) for error in errors]
    deepest = max(range(len(errors)), key=lambda i: (len(paths[i]), -i))
    return _describe(errors[deepest], dotted_path(paths[deepest]))


def as_missing_body(exc: RequestValidationError) -> MalformedBodyError:
    """The error for a body that was not parsed."""
    if exc.body is None:
        return MalformedBodyError("the body is empty; a JSON object is needed")
    return MalformedBodyError("the body was not read: the Content-Type header must be application/json")


def dotted_path(steps: Sequence[str | int]) -> str:
    """Write ("messages", 2, "content") as messages[2].content. Long names are cut, because callers can invent them."""
    path = ""
    for step in steps:
        if isinstance(step, str):
            name = step if len(step) <= MAX_VALUE_CHARS else step[:MAX_VALUE_CHARS] + "..."
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
    except ApiError as error:
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
        raise InvalidRequestError(f"{path} is required", param=path)
    return value


def check_range(name: str, value: int, low: int, high: int | None, *, param: str | None = None) -> int:
    """Check that low <= value <= high, and return the value. `param` is the field if `name` is not its name.

    Raises:
        InvalidRequestError: The value is out of range.
    """
    if value < low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"between {low} and {high}"
        raise InvalidRequestError(f"{name} must be {bound}, got {shown(value)}", param=param or name)
    return value


def check_token_ids(token_ids: Sequence[int], vocab_size: int, name: str) -> None:
    """Check token ids that a caller sent.

    Raises:
        InvalidRequestError: An id is not in the vocabulary.
    """
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        i = next(i for i, token_id in enumerate(token_ids) if not 0 <= token_id < vocab_size)
        raise InvalidRequestError(
            f"{name}[{i}] must be a token id between 0 and {vocab_size - 1}, got {token_ids[i]}", param=f"{name}[{i}]"
        )


def _steps(error: Any, body: Any) -> list[str | int]:
    """The steps of a location that exist in the body. The name of a missing field is kept at the end."""
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


def _describe(error: Any, path: str) -> InvalidRequestError:
    if error["type"] == "missing":
        return InvalidRequestError(f"{path} is required", param=path)
    text = error["msg"][0].lower() + error["msg"][1:]
    is_type = error["type"].endswith(("_type", "_parsing", "int_from_float", "tag_not_found"))
    kind = InvalidTypeError if is_type else InvalidRequestError
    return kind(f"{path or 'the body'}: {text}, got {shown(error['input'])}", param=path or None)
