"""Reads the values of pictures in the memory that a server shares, without a copy, when they are encoded.

The memory is mapped no longer than that. Its seals promise that it stays as long as it is, and what it is: to read
behind the end of a mapped file would end the engine.
"""

import fcntl
import mmap
import os

from weft.engine.loop.sight import PictureError
from weft.engine.wire.pictures import SEALS, Picture, SharedData


def values_of(picture: Picture) -> bytes | mmap.mmap:
    """The values of all arrays of a picture, as a buffer, whose memory goes when nobody has it any more.

    Raises:
        PictureError: They are not there: whoever shared them has ended, or has not sealed them.
    """
    if picture.shared is None:
        return picture.data
    try:
        return _mapped(picture.shared)
    except OSError as error:
        raise PictureError(f"a picture is not there ({error.strerror})") from None


def _mapped(shared: SharedData) -> mmap.mmap:
    with open(f"/proc/{shared.process}/fd/{shared.number}", "rb", buffering=0) as file:
        found = os.fstat(file.fileno())
        if found.st_ino != shared.inode:  # the number stands for something else by now
            raise PictureError("a picture is not there (another file is)")
        if fcntl.fcntl(file.fileno(), fcntl.F_GET_SEALS) & SEALS != SEALS or found.st_size < shared.num_bytes:
            raise PictureError("a picture is in memory that may change")
        return mmap.mmap(file.fileno(), shared.num_bytes, access=mmap.ACCESS_COPY)  # writes would be the engine's own
