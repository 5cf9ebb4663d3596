"""Defines the errors that clients get: the tree of exceptions, and OpenAI's error object.

Every error leaves the server in the shape of its route's API (`http/middleware.py`), inside an open stream too.
Messages state the bound and the value given. Internal details are logged, never sent.

    ApiError
      InvalidRequestError        400  the caller's fault
        UnprocessableError       422  as InvalidRequestError, on routes whose clients expect it
      InvalidTypeError              a value of the wrong JSON type
        MalformedBodyError            a body that is not JSON, or holds too many values
        UnsupportedParameterError     a known field that this server does not honour
          ThreadsUnsupportedError     Anthropic's `thread`
        UnsupportedValueError         a known field with a value that this model cannot take
        UnknownParameterError         an unknown field, in strict mode
        ContextLengthError            prompt and requested output do not fit the context
        PoisonRequestError            the request crashed the engine when it ran alone
        GrammarError                  a grammar that cannot be compiled
          JsonSchemaError             a JSON schema that cannot be compiled
        RouteError                    404, 405: no such route or method
        MalformedHttpError            not a valid HTTP request
        ModelNotFoundError       404
        NotFoundError            404  a stored object that is not there, or not this key's
        ReceiveTimeoutError      408
        BodyTooLargeError        413
        HeadersTooLargeError     431
      AuthenticationError        401
      OriginError                403  a web page that may not use this server
      AdminKeyError              403  nobody may manage models, since there is no admin_key
      InternalError              500  the server's fault
      QueueFullError             503  another replica may have room
      TooManyConnectionsError    503
      ShuttingDownError          503
        EngineLeftError               this server is shutting down and has left the engine
      EngineRestartingError      503
        EngineUnavailableError        no engine now: it is loading, hanging or restarting
        EngineDiedError               the engine died while the request ran
        ModelLoadingError             a model that is loaded on demand is not there yet
      ModelFailedError           503  a model or an adapter that is loaded on demand cannot be loaded
      DeadlineError              504
      StorageError               503  the data folder cannot be read or written
        StorageFullError         507  the disk, or what files may take of it, is full
"""

from collections.abc import Iterator, Mapping
from typing import ClassVar, TypedDict

import msgspec
from typing_extensions import Unpack

from weft.engine.wire.messages import RejectReason

MAX_MESSAGE_CHARS = 4000
"""Longest message that is sent. Weft's own messages are shorter; those of templates and libraries may not be."""
MAX_VALUE_CHARS = 80
"""Most characters of a value that a message quotes."""
RETRY_AFTER_S = 2
"""How long clients are asked to wait until the queue has room or the engine is back."""

_NO_RETRY = {"x-should-retry": "false"}
_RETRY_LATER = {"retry-after": str(RETRY_AFTER_S)}


class _Facts(TypedDict, total=False):
    """What a class of errors sends, besides its message."""

    status: int
    type: str
    code: str | None
    headers: Mapping[str, str]


class ApiError(Exception):
    """An error response. Subclasses name what differs from their base. `param` is a dotted path into the body."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = "internal_error"
    headers: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, **facts: Unpack[_Facts]) -> None:
        super().__init_subclass__()
        for name, value in facts.items():
            setattr(cls, name, value)

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequestError(ApiError, status=400, type="invalid_request_error", code="invalid_value"):
    """The body, a value in it, or the path is wrong."""


class InvalidTypeError(InvalidRequestError, code="invalid_type"):
    """A value has the wrong JSON type."""


class MalformedBodyError(InvalidRequestError, code=None):
    """The body is not JSON, its content type is not, or it holds too many values."""


class UnprocessableError(InvalidRequestError, status=422):
    """A body does not match the schema, on routes whose clients expect 422 then."""


class UnsupportedParameterError(InvalidRequestError, code="unsupported_parameter"):
    """A known field asks for something that this server does not support."""


class ThreadsUnsupportedError(UnsupportedParameterError, code="thread_unsupported_request"):
    """A message thread, which this server does not keep. By this code Anthropic's SDK knows to send everything."""


class UnsupportedValueError(InvalidRequestError, code="unsupported_value"):
    """A known field has a value that this model cannot take, such as an image."""


class UnknownParameterError(InvalidRequestError, code="unknown_parameter"):
    """A field is unknown, and parameters are strict."""


class ContextLengthError(InvalidRequestError, code="context_length_exceeded"):
    """Prompt and requested output do not fit the context.

    `num_tokens` counts the prompt, at least; `max_num_tokens` is what there is room for. Both are 0 if it is not known.
    """

    def __init__(self, message: str, *, param: str | None = None, num_tokens: int = 0, max_num_tokens: int = 0) -> None:
        super().__init__(message, param=param)
        self.num_tokens = num_tokens
        self.max_num_tokens = max_num_tokens


class PoisonRequestError(InvalidRequestError, code="poison_request", headers=_NO_RETRY):
    """The request crashed the engine when it ran alone. A 400, so that no proxy retries it on another replica."""


class GrammarError(InvalidRequestError, code="invalid_grammar", headers=_NO_RETRY):
    """The grammar for the output cannot be compiled. A 400 that clients do not retry."""


class JsonSchemaError(GrammarError, code="invalid_json_schema"):
    """The JSON schema for the output cannot be compiled."""


class ModelNotFoundError(InvalidRequestError, status=404, code="model_not_found"):
    """The requested model is not served here."""


class NotFoundError(InvalidRequestError, status=404, code="not_found"):
    """This API key has no such object."""


class BodyTooLargeError(InvalidRequestError, status=413, code="request_too_large"):
    """The body is larger than the limit."""


class MalformedHttpError(InvalidRequestError, code="malformed_http"):
    """The received bytes are not a valid HTTP request."""


class HeadersTooLargeError(InvalidRequestError, status=431, code="headers_too_large"):
    """The headers exceed the limits."""


class ReceiveTimeoutError(InvalidRequestError, status=408, code="receive_timeout"):
    """The request did not arrive in time."""


class RouteError(InvalidRequestError, code=None):
    """There is no such route, or it does not allow this method."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str]) -> None:
        super().__init__(message)
        self.status = status  # type: ignore[misc]  # the only class whose status is set at run time
        self.headers = headers  # type: ignore[misc]


class AuthenticationError(
    ApiError, status=401, type="authentication_error", code="invalid_api_key", headers={"www-authenticate": "Bearer"}
):
    """The API key is missing or wrong."""


class OriginError(ApiError, status=403, type="permission_error", code="origin_not_allowed"):
    """The browser's Host or Origin may not use this server."""


class AdminKeyError(ApiError, status=403, type="permission_error", code="no_admin_key"):
    """Models may be managed by nobody."""


class NotAllowedError(ApiError, status=403, type="permission_error", code="not_allowed"):
    """The operator has not allowed this."""


class InternalError(ApiError):
    """An internal failure that the caller cannot fix."""


class QueueFullError(ApiError, status=503, type="server_overloaded", code="queue_full", headers=_RETRY_LATER):
    """The limit of waiting requests is reached."""


class TooManyConnectionsError(
    ApiError, status=503, type="server_overloaded", code="too_many_connections", headers=_RETRY_LATER
):
    """The limit of open connections is reached."""


class ShuttingDownError(ApiError, status=503, code="shutting_down", headers={"connection": "close", **_RETRY_LATER}):
    """The process is draining. New requests should use another connection."""


class EngineRestartingError(ApiError, status=503, code="engine_restarting", headers=_RETRY_LATER):
    """No engine now: it is loading, hanging, or being replaced after its death."""


class EngineUnavailableError(EngineRestartingError):
    """No engine is connected, or it disconnected before it replied. The same request may succeed in a moment."""

    def __init__(self) -> None:
        super().__init__("the engine is loading, hangs or is restarting; try again in a moment")


class ModelLoadingError(EngineRestartingError, code="model_loading"):
    """The model was not loaded in time: it takes long, or others need its room."""


class ModelFailedError(ApiError, status=503, code="model_failed", headers={"retry-after": "30"}):
    """The model or its adapter cannot be loaded. Later requests try again, but not at once."""


class EngineDiedError(EngineRestartingError):
    """The connection broke while the request ran. The output so far has been delivered."""

    def __init__(self) -> None:
        super().__init__("the engine died while the request ran and is being restarted; try again")


class EngineLeftError(ShuttingDownError):
    """This server is shutting down and has disconnected from the engine, which may still run."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down and had to cut this request")


class DeadlineError(ApiError, status=504, code="request_timeout"):
    """The client's deadline passed while the request was waiting."""


class StorageError(ApiError, status=503, code="storage_unavailable", headers=_RETRY_LATER):
    """The data folder cannot be read or written; nothing was stored."""


class StorageFullError(StorageError, status=507, code="storage_full", headers=_NO_RETRY):
    """There is no room; nothing was stored. Trying again is of no use until something is deleted."""


_REJECTIONS: Mapping[RejectReason, type[ApiError]] = {
    RejectReason.INVALID: InvalidRequestError,
    RejectReason.CONTEXT_LENGTH: ContextLengthError,
    RejectReason.QUEUE_FULL: QueueFullError,
    RejectReason.POISON: PoisonRequestError,
    RejectReason.GRAMMAR: GrammarError,
    RejectReason.ADAPTER: ModelFailedError,
}


def shown(value: object) -> str:
    """A value as messages quote it, cut to a maximum length. The rest of a long value is not read."""
    text = ""
    for piece in _pieces(value):
        text += piece
        if len(text) > MAX_VALUE_CHARS:
            return text[:MAX_VALUE_CHARS] + "..."
    return text


def _pieces(value: object) -> Iterator[str]:
    """Yield the `repr` of JSON data piece by piece."""
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
    """The error for a request that the engine rejected. The message may be shown to the client."""
    return _REJECTIONS[reason](message)


def as_api_error(exc: Exception) -> ApiError:
    """The error for any exception. An unexpected exception reveals no details."""
    if isinstance(exc, ApiError):
        return exc
    return InternalError("internal error; the server's log has the details under this request's x-request-id")


def error_text(error: ApiError) -> str:
    """The message as it is sent. It may quote the caller's text: a lone surrogate there has no UTF-8."""
    return error.message[:MAX_MESSAGE_CHARS].encode("utf-8", "replace").decode()


def error_body(error: ApiError) -> bytes:
    """OpenAI's error object as JSON."""
    fields = {"message": error_text(error), "type": error.type, "param": error.param, "code": error.code}
    return msgspec.json.encode({"error": fields})
