"""Why an output ended."""

import enum


class FinishReason(enum.IntEnum):
    """Why an output ended. Only the server turns it into OpenAI's words."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    TIMEOUT = 4
    DEAD_END = 5
