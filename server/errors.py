"""What a client is told when its request fails: the exception tree, and how an exception becomes an answer.

Every error leaves the server as OpenAI's error object, on every route and inside an open stream. Messages state the
bound and the value given; what went wrong inside is logged, never sent.

    ApiError
      InvalidRequestError        400  the caller's fault
        UnsupportedParameterError     a known field that this server does not honour
        UnsupportedValueError         a known field with a value that this model cannot take
        UnknownParameterError         a field that nobody knows, in strict mode
        ContextLengthError            prompt and requested output do not fit the context
        PoisonRequestError            killed the engine when it ran alone
        GrammarError                  a JSON schema or grammar that cannot be compiled
        RouteError                    404, 405: no such route or method
        MalformedHttpError            no HTTP request
        ModelNotFoundError       404
        ReceiveTimeoutError      408
        BodyTooLargeError        413
        HeadersTooLargeError     431
      AuthenticationError        401
      OriginError                403  a web page that may not ask
      InternalError              500  our fault
      QueueFullError             503  another replica may help
      TooManyConnectionsError    503
      ShuttingDownError          503
        EngineLeftError               this server is about to end and has left the engine
      EngineRestartingError      503
        EngineUnavailableError        no engine now: it loads, hangs, or is being restarted
        EngineDiedError               the engine went away while the request ran
      DeadlineError              504
"""

from collections.abc import Iterator, Mapping
from typing import ClassVar

import msgspec
from starlette.responses import Response

from weft.engine.shared.messages import RejectReason

MAX_MESSAGE_CHARS = 4000
"""Whoever writes a message bounds what it quotes of a request; templates and libraries do not."""
MAX_VALUE_CHARS = 80
"""Of a value that a message quotes."""
RETRY_AFTER_S = 2
"""What a client is asked to wait for a queue to move or an engine to come back."""


class ApiError(Exception):
    """An answer other than success. Subclasses fix status, type and code; `param` is a dotted path into the body."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = "internal_error"
    headers: ClassVar[Mapping[str, str]] = {}

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequestError(ApiError):
    """The body, a value in it or the path is wrong."""

    status = 400
    type = "invalid_request_error"
    code: ClassVar[str | None] = "invalid_value"


class InvalidTypeError(InvalidRequestError):
    """A value has the wrong JSON type."""

    code = "invalid_type"


class MalformedBodyError(InvalidRequestError):
    """The body is no JSON, or is not said to be."""

    code = None


class UnsupportedParameterError(InvalidRequestError):
    """A known field asks for something that this server does not do."""

    code = "unsupported_parameter"


class UnsupportedValueError(InvalidRequestError):
    """A known field has a value that this model cannot take, for example an image."""

    code = "unsupported_value"


class UnknownParameterError(InvalidRequestError):
    """A field that nobody knows, while parameters are strict."""

    code = "unknown_parameter"


class ContextLengthError(InvalidRequestError):
    """Prompt and requested output do not fit the context."""

    code = "context_length_exceeded"


class PoisonRequestError(InvalidRequestError):
    """The request killed the engine when it ran alone. A 400, so that no proxy tries it on the next replica."""

    code = "poison_request"
    headers: ClassVar[Mapping[str, str]] = {"x-should-retry": "false"}


class GrammarError(InvalidRequestError):
    """What the output is to follow cannot be compiled. A 400 that no client tries again."""

    code = "invalid_grammar"
    headers: ClassVar[Mapping[str, str]] = {"x-should-retry": "false"}


class JsonSchemaError(GrammarError):
    """The same of a JSON schema."""

    code = "invalid_json_schema"


class ModelNotFoundError(InvalidRequestError):
    """The model is not the one that is served."""

    status = 404
    code = "model_not_found"


class BodyTooLargeError(InvalidRequestError):
    """The body is longer than the server reads."""

    status = 413
    code = "request_too_large"


class MalformedHttpError(InvalidRequestError):
    """What came is no HTTP request."""

    code = "malformed_http"


class HeadersTooLargeError(InvalidRequestError):
    """More headers than the server reads."""

    status = 431
    code = "headers_too_large"


class ReceiveTimeoutError(InvalidRequestError):
    """The request did not come in time."""

    status = 408
    code = "receive_timeout"


class RouteError(InvalidRequestError):
    """No such route, or not with this method."""

    code = None

    def __init__(self, status: int, message: str, headers: Mapping[str, str]) -> None:
        super().__init__(message)
        self.status = status  # type: ignore[misc]  # the one class whose status is known only at run time
        self.headers = headers  # type: ignore[misc]


class AuthenticationError(ApiError):
    """No key, or a wrong one."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"
    headers: ClassVar[Mapping[str, str]] = {"www-authenticate": "Bearer"}


class OriginError(ApiError):
    """The host or the origin that a browser names may not use this server."""

    status = 403
    type = "permission_error"
    code = "origin_not_allowed"


class InternalError(ApiError):
    """Something broke that the caller cannot mend."""


class QueueFullError(ApiError):
    """As many requests wait as are allowed to."""

    status = 503
    type = "server_overloaded"
    code = "queue_full"
    headers: ClassVar[Mapping[str, str]] = {"retry-after": str(RETRY_AFTER_S)}


class TooManyConnectionsError(ApiError):
    """As many connections are open as may be."""

    status = 503
    type = "server_overloaded"
    code = "too_many_connections"
    headers: ClassVar[Mapping[str, str]] = {"retry-after": str(RETRY_AFTER_S)}


class ShuttingDownError(ApiError):
    """The process drains; new requests belong on another connection."""

    status = 503
    code = "shutting_down"
    headers: ClassVar[Mapping[str, str]] = {"connection": "close", "retry-after": str(RETRY_AFTER_S)}


class EngineRestartingError(ApiError):
    """No engine now: it loads, hangs, or died and is being replaced."""

    status = 503
    code = "engine_restarting"
    headers: ClassVar[Mapping[str, str]] = {"retry-after": str(RETRY_AFTER_S)}


class EngineUnavailableError(EngineRestartingError):
    """No engine is connected, or it went away before it answered; the same request may succeed in a moment."""

    def __init__(self) -> None:
        super().__init__("the engine is loading, hangs or is restarting; try again in a moment")


class EngineDiedError(EngineRestartingError):
    """The connection broke while the request ran; what was generated so far has been handed out before."""

    def __init__(self) -> None:
        super().__init__("the engine died while the request ran and is being restarted; try again")


class EngineLeftError(ShuttingDownError):
    """This server has left the engine: it ends, whatever the engine does."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down and had to cut this request")


class DeadlineError(ApiError):
    """The client's own deadline passed while the request waited."""

    status = 504
    code = "request_timeout"


_REJECTIONS: Mapping[RejectReason, type[ApiError]] = {
    RejectReason.INVALID: InvalidRequestError,
    RejectReason.CONTEXT_LENGTH: ContextLengthError,
    RejectReason.QUEUE_FULL: QueueFullError,
    RejectReason.POISON: PoisonRequestError,
    RejectReason.GRAMMAR: GrammarError,
}


def shown(value: object) -> str:
    """A value as a message quotes it: not at length, nor looked at beyond that."""
    text = ""
    for piece in _pieces(value):
        text += piece
        if len(text) > MAX_VALUE_CHARS:
            return text[:MAX_VALUE_CHARS] + "..."
    return text


def _pieces(value: object) -> Iterator[str]:
    """What `repr` writes of JSON data, bit by bit."""
    if isinstance(value, str):
        yield repr(value[: MAX_VALUE_CHARS + 1])
    elif isinstance(value, list | dict):
        yield "[" if isinstance(value, list) else "{"
        for i, item in enumerate(value):
            yield ", " if i else ""
            yield from _pieces(item)
            if isinstance(value, dict):
                yield ": "
                yield from _pieces(value[item])
        yield "]" if isinstance(value, list) else "}"
    else:
        yield repr(value)


def rejection(reason: RejectReason, message: str) -> ApiError:
    """What a client is told when the engine did not take its request in; the message is fit for it."""
    return _REJECTIONS[reason](message)


def as_api_error(exc: Exception) -> ApiError:
    """What a client is told of any exception; an unforeseen one tells nothing."""
    if isinstance(exc, ApiError):
        return exc
    return InternalError("internal error; the server's log has the details under this request's x-request-id")


def _object_schema(properties: dict[str, object]) -> dict[str, object]:
    return {"type": "object", "required": [*properties], "properties": properties}


_TEXT, _TEXT_OR_NULL = {"type": "string"}, {"type": ["string", "null"]}
ERROR_SCHEMA = _object_schema(
    {"error": _object_schema({"message": _TEXT, "type": _TEXT, "param": _TEXT_OR_NULL, "code": _TEXT_OR_NULL})}
)
"""The error object as JSON Schema, for the OpenAPI description."""


def error_body(error: ApiError) -> bytes:
    """OpenAI's error object as JSON."""
    # A message may quote the caller's text; a lone surrogate in it has no UTF-8 form.
    message = error.message[:MAX_MESSAGE_CHARS].encode("utf-8", "replace").decode()
    fields = {"message": message, "type": error.type, "param": error.param, "code": error.code}
    return msgspec.json.encode({"error": fields})


def error_response(error: ApiError) -> Response:
    """The whole answer to a request that failed before its first byte."""
    return Response(error_body(error), error.status, dict(error.headers), media_type="application/json")
