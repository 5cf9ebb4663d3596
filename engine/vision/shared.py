"""Takes the values of pictures out of the memory that a server shares, when a request is accepted.

From then on the request has them, so the server may end in any way. The copy is made between two steps.
"""

from msgspec.structs import replace

from weft.engine.loop.pending import RejectedError
from weft.engine.wire.inputs import TokensInput
from weft.engine.wire.messages import AddRequest, RejectReason
from weft.engine.wire.pictures import Picture


def with_pictures(add: AddRequest) -> AddRequest:
    """The request with the values of its pictures; most have none.

    Raises:
        RejectedError: They are not there: whoever shared them has ended.
    """
    given = add.input
    if not isinstance(given, TokensInput) or not given.pictures:
        return add
    try:
        pictures = [_taken(picture) for picture in given.pictures]
    except OSError as error:
        fault = f"a picture is not there ({error.strerror})"
        raise RejectedError(RejectReason.INVALID, fault) from None
    return replace(add, input=replace(given, pictures=pictures))


def _taken(picture: Picture) -> Picture:
    return picture if picture.shared is None else replace(picture, data=picture.shared.read(), shared=None)
