"""From pydantic's findings to one `InvalidRequestError` that names the field, the bound and the value.

A finding's location holds the tags of unions besides keys and indices; only what can be followed in the body itself
is part of the path. Of several findings the one deepest in the body is told: it is nearest to what was meant.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

from fastapi.exceptions import RequestValidationError

from server.errors import InvalidRequestError, InvalidTypeError, MalformedBodyError

_MAX_VALUE_CHARS = 80

T = TypeVar("T")


def as_invalid_request(exc: RequestValidationError) -> InvalidRequestError:
    """Turn the findings on one body into the answer for the client."""
    errors: Sequence[Any] = exc.errors()
    if errors[0]["type"] == "json_invalid":
        position = errors[0]["loc"][-1]
        return MalformedBodyError(f"the body is not valid JSON: {errors[0]['ctx']['error']} at character {position}")
    if exc.body is None:
        return MalformedBodyError("the body is empty; a JSON object is needed")
    if isinstance(exc.body, bytes):
        return MalformedBodyError("the body was not read: the Content-Type header must be application/json")
    paths = [_steps(error, exc.body) for error in errors]
    deepest = max(range(len(errors)), key=lambda i: (len(paths[i]), -i))
    return _describe(errors[deepest], dotted_path(paths[deepest]))


def as_malformed_body(exc: Exception) -> MalformedBodyError:
    """The answer for a body that could not be parsed at all, for the reason that is the cause of `exc`."""
    match exc.__cause__:
        case UnicodeDecodeError():
            fault = "it is not encoded in UTF-8"
        case RecursionError():
            fault = "it is nested too deeply"
        case ValueError():
            fault = "a number in it has too many digits"
        case _:
            fault = "it cannot be read"
    return MalformedBodyError(f"the body is not valid JSON: {fault}")


def dotted_path(steps: Sequence[str | int]) -> str:
    """Write ("messages", 2, "content") as messages[2].content."""
    path = ""
    for step in steps:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return path


def shown(value: object) -> str:
    """A value as a message quotes it: not at length."""
    text = repr(value)
    return text if len(text) <= _MAX_VALUE_CHARS else text[:_MAX_VALUE_CHARS] + "..."


def required(value: T | None, path: str) -> T:
    """Return the value of the field at `path`.

    Raises:
        InvalidRequestError: There is none.
    """
    if value is None:
        raise InvalidRequestError(f"{path} is required", param=path)
    return value


def _steps(error: Any, body: Any) -> list[str | int]:
    """Follow a location into the body, leaving out what is not in it; a missing field ends its path all the same."""
    steps: list[str | int] = []
    location = error["loc"][1:]  # the first element says "body"
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
