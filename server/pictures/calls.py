"""What the server and the process that reads pictures say to each other, in frames of MessagePack, and their bounds.

Files go to it through the socket. Arrays come back in memory that the server has made for that, one picture at a time.
"""

from typing import Final

import msgspec

from weft.engine.wire.pictures import PictureArray

MAX_FILE_BYTES: Final = 20 << 20
"""Of the file of a picture."""
MAX_PIXELS: Final = 50_000_000
MAX_RATIO: Final = 200
"""Of the longer side of a picture to the shorter one: some processors make the shorter one as long as they need."""
FORMATS: Final = ("PNG", "JPEG", "WEBP")
CPU_S: Final = 15.0
"""Seconds of a core for one picture."""
MAX_ANSWER_BYTES: Final = 4 << 20


class Ready(msgspec.Struct):
    """The first answer: the processor is loaded, or why not.

    Attributes:
        sign: What a chat template writes for a picture.
        fault: For clients.
        text: More of it, for the log: it may name paths.
    """

    sign: str = ""
    fault: str | None = None
    text: str = ""


class Made(msgspec.Struct):
    """What became of a file: what the model reads, or a fault that names a bound and the value.

    Attributes:
        text: What stands in the prompt.
        placeholder: The text of the token in it that features take the place of, num_tokens times.
        digest: Equal for equal pixels and equal settings of the processor.
        arrays, grid, num_bytes, is_attended: See `Picture`; the values are in memory that both processes have open.
    """

    fault: str | None = None
    text: str = ""
    placeholder: str = ""
    num_tokens: int = 0
    digest: bytes = b""
    arrays: dict[str, PictureArray] = {}
    num_bytes: int = 0
    grid: tuple[int, int] | None = None
    is_attended: bool = False
