"""Pictures as a checkpoint's processor made them: what spans of a prompt stand for. Imports neither torch nor numpy.

Their values cross the process boundary in memory without a name that a server process has open, so nothing of them is
left, however that process ends, and its event loop does not copy them.
"""

import errno
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

MAX_REQUEST_BYTES: Final = 192 << 20
"""Of the arrays of one request."""
ITEM_BYTES: Final = {"float32": 4, "int64": 8, "bool": 1}
"""Bytes of a value, by the name of its type."""


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
    """Memory that a process has open under a number until the request has ended.

    Attributes:
        inode: That of the memory: a number may stand for other memory later.
    """

    process: int
    number: int
    num_bytes: int
    inode: int

    def read(self) -> bytes:
        """A copy of it.

        Raises:
            OSError: It is not there any more.
        """
        with open(f"/proc/{self.process}/fd/{self.number}", "rb", buffering=0) as file:
            if os.fstat(file.fileno()).st_ino != self.inode:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            return os.pread(file.fileno(), self.num_bytes, 0)


class Picture(msgspec.Struct, array_like=True, frozen=True, weakref=True):
    """One picture.

    Attributes:
        token_id: Of the tokens in its span that its features take the place of; others are markers between them.
        is_attended: Whether layers attend to it: then its only token, of this id, has the embedding of every other.
        arrays: What the model reads, under the names of transformers, such as pixel_values.
        data: The values of all arrays.
        shared: Where these are until the engine has taken them; None: here.
    """

    token_id: int
    arrays: dict[str, PictureArray]
    data: bytes = b""
    shared: SharedData | None = None
    is_attended: bool = False

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
        num_attended: Most features of a picture that layers attend to; 0 where they take the place of tokens.
    """

    token_id: int
    num_values: int
    num_attended: int = 0


def pictures_fault(
    pictures: Sequence[Picture], num_spans: int, token_id: int | None, max_attended: int = 0
) -> str | None:
    """What is wrong with the pictures of a request; None when nothing is.

    Args:
        num_spans: Of its prompt; without pictures these may stand for anything.
        token_id: That of the model's pictures; None: it sees none.
        max_attended: Most of them where layers of the model attend to them; 0 where they do not.
    """
    if not pictures:
        return None
    if token_id is None:
        return "this model takes no pictures"
    if len(pictures) != num_spans:
        return f"each of the {num_spans} spans of the prompt must have a picture, got {len(pictures)}"
    if max_attended and len(pictures) > max_attended:
        return f"a request may have at most {max_attended} pictures for this model, got {len(pictures)}"
    if (num_bytes := sum(picture.num_bytes for picture in pictures)) > MAX_REQUEST_BYTES:
        return f"the pictures must have at most {MAX_REQUEST_BYTES} bytes, got {num_bytes}"
    for picture in pictures:
        if picture.token_id != token_id:
            return f"a picture must stand at tokens {token_id}, got {picture.token_id}"
        if picture.is_attended != (max_attended > 0):
            return f"is_attended must be {max_attended > 0} for pictures of this model, got {picture.is_attended}"
        for name, array in picture.arrays.items():
            if not array.num_bytes or not 0 <= array.start <= len(picture.data) - array.num_bytes:
                return f"{name} must be whole and hold {', '.join(ITEM_BYTES)}, got {array.dtype} {array.shape}"
    return None
