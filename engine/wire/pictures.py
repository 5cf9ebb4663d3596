"""Pictures as a checkpoint's processor made them: what spans of a prompt stand for. Imports neither torch nor numpy.

Their values cross the process boundary in memory without a name that a server process has open, so nothing of them is
left, however that process ends, and its event loop does not copy them.
"""

import fcntl
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

MAX_REQUEST_BYTES: Final = 512 << 20
"""Of the arrays of one request."""
ITEM_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "bool": 1}
"""Bytes of a value, by the name of its type in torch. Pixels come in the type that the engine computes in."""
SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
"""Of memory that is shared: to read behind the end of memory that somebody cuts would end the engine."""


class PictureArray(msgspec.Struct, array_like=True, frozen=True):
    """An array, its values in the machine's order of bytes.

    Attributes:
        start: Where it begins in the data of its picture.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int = 0

    @property
    def num_bytes(self) -> int:
        """Of its values; 0 for a type that is not known."""
        return ITEM_BYTES.get(self.dtype, 0) * math.prod(self.shape)


class SharedData(msgspec.Struct, array_like=True, frozen=True):
    """Memory that a process has sealed, and has open under a number until the request has ended.

    Attributes:
        inode: That of the memory: a number may stand for other memory later.
    """

    process: int
    number: int
    num_bytes: int
    inode: int


class Picture(msgspec.Struct, array_like=True, frozen=True, weakref=True):
    """One picture.

    Attributes:
        token_id: Of the tokens in its span that its features take the place of; others are markers between them.
        is_attended: Whether layers attend to it: then its only token, of this id, has the embedding of every other.
        arrays: What the model reads, under the names of transformers, such as pixel_values.
        data: The values of all arrays.
        shared: Where these are instead; None: here.
        grid: Rows and columns of its features, one after another, which its tokens' positions follow; None: these are
            as those of text.
    """

    token_id: int
    arrays: dict[str, PictureArray]
    data: bytes = b""
    shared: SharedData | None = None
    grid: tuple[int, int] | None = None
    is_attended: bool = False

    @property
    def position_offset(self) -> int:
        """Of tokens behind it: its own have as many positions as rows or columns."""
        return max(self.grid) - math.prod(self.grid) if self.grid else 0

    @property
    def num_bytes(self) -> int:
        """Of the values."""
        return self.shared.num_bytes if self.shared else len(self.data)


@dataclass(frozen=True, slots=True)
class Vision:
    """How a checkpoint sees.

    Attributes:
        token_id: See `Picture`.
        num_values: Weights beside those of the text half.
        num_encoding_values: That are there at once while the largest picture is encoded which memory is planned for.
        sections: How many frequencies turn by time, by row and by column, and so on; empty where all turn by one
            position.
        is_interleaved: Whether the axes take turns, until one has all its frequencies. Time has what is left.
        num_stacked: Layers of the text half behind which more features are added.
        longest: Most tokens of a picture that see each other, where they do; else 0.
        embedded_id: The token that stands in its tokens' places where tokens are embedded; None: they themselves.
        num_attended: Most features of a picture that layers attend to; 0 where they take the place of tokens.
    """

    token_id: int
    num_values: int
    num_encoding_values: int = 0
    sections: tuple[int, ...] = ()
    is_interleaved: bool = False
    num_stacked: int = 0
    longest: int = 0
    embedded_id: int | None = None
    num_attended: int = 0


def pictures_fault(
    pictures: Sequence[Picture], lengths: Sequence[int], token_id: int | None, max_attended: int = 0
) -> str | None:
    """What is wrong with the pictures of a request; None when nothing is.

    Args:
        lengths: Of the spans of its prompt; without pictures these may stand for anything.
        token_id: That of the model's pictures; None: it sees none.
        max_attended: Most of them where layers of the model attend to them; 0 where they do not.
    """
    if not pictures:
        return None
    if token_id is None:
        return "this model takes no pictures"
    if len(pictures) != len(lengths):
        return f"each of the {len(lengths)} spans of the prompt must have a picture, got {len(pictures)}"
    if max_attended and len(pictures) > max_attended:
        return f"a request may have at most {max_attended} pictures for this model, got {len(pictures)}"
    if (num_bytes := sum(picture.num_bytes for picture in pictures)) > MAX_REQUEST_BYTES:
        return f"the pictures must have at most {MAX_REQUEST_BYTES} bytes, got {num_bytes}"
    for picture, length in zip(pictures, lengths, strict=True):
        if picture.grid and (min(picture.grid) < 1 or math.prod(picture.grid) != length):
            return f"a picture of {length} tokens must have as many rows times columns, got {picture.grid}"
        if picture.token_id != token_id:
            return f"a picture must stand at tokens {token_id}, got {picture.token_id}"
        if picture.is_attended != (max_attended > 0):
            return f"is_attended must be {max_attended > 0} for pictures of this model, got {picture.is_attended}"
        for name, array in picture.arrays.items():
            if array.num_bytes <= 0 or not 0 <= array.start <= picture.num_bytes - array.num_bytes:
                return f"{name} must be whole and hold {', '.join(ITEM_BYTES)}, got {array.dtype} {array.shape}"
    return None
