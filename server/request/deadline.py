"""When a client will have given up."""

import time

from starlette.requests import Request


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
