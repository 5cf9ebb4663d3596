"""Takes the values of pictures out of the memory that a server shares, when a request is accepted.

From then on the request has them, so the server may end in any way. The copy is made between two steps.
"""

import weakref
from collections.abc import Sequence

from msgspec.structs import replace

from weft.engine.loop.pending import RejectedError
from weft.engine.wire.inputs import TokensInput
from weft.engine.wire.messages import AddRequest, RejectReason
from weft.engine.wire.pictures import Picture


class PicturePlaces:
    """Counts pictures of requests that have not ended, where each needs room on the device as long as they run."""

    def __init__(self, most: int) -> None:
        """Take so many at once."""
        self._most, self._num_taken = most, 0

    def take(self, pictures: Sequence[Picture]) -> None:
        """Count these as long as they live.

        Raises:
            RejectedError: There are too many.
        """
        if (wanted := self._num_taken + len(pictures)) > self._most >= len(pictures):
            fault = f"with this request there would be {wanted} pictures, and at most {self._most} are shown at once"
            raise RejectedError(RejectReason.QUEUE_FULL, fault)
        for picture in pictures:
            self._num_taken += 1
            weakref.finalize(picture, self._free).atexit = False

    def _free(self) -> None:
        self._num_taken -= 1


def with_pictures(add: AddRequest, places: PicturePlaces | None = None) -> AddRequest:
    """The request with the values of its pictures; most have none.

    Args:
        places: For them; None where they need none.

    Raises:
        RejectedError: They are not there: whoever shared them has ended. Or there are too many.
    """
    given = add.input
    if not isinstance(given, TokensInput) or not given.pictures:
        return add
    try:
        pictures = [_taken(picture) for picture in given.pictures]
    except OSError as error:
        fault = f"a picture is not there ({error.strerror})"
        raise RejectedError(RejectReason.INVALID, fault) from None
    if places is not None:
        places.take(pictures)
    return replace(add, input=replace(given, pictures=pictures))


def _taken(picture: Picture) -> Picture:
    return picture if picture.shared is None else replace(picture, data=picture.shared.read(), shared=None)
