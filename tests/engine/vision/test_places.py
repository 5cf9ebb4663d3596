"""Pictures that layers attend to have so many places at once, from the acceptance of a request to its end."""

import pytest

from weft.engine.loop.pending import RejectedError
from weft.engine.vision.shared import PicturePlaces, with_pictures
from weft.engine.wire.inputs import TokensInput, TokenSpan
from weft.engine.wire.messages import AddRequest, RejectReason
from weft.engine.wire.params import SamplingParams
from weft.engine.wire.pictures import Picture


def asked(num: int) -> AddRequest:
    pictures = [Picture(5, {}, b"x", is_attended=True) for _ in range(num)]
    spans = [TokenSpan(i, 1, b"x") for i in range(num)]
    return AddRequest(TokensInput([5] * num, spans=spans, pictures=pictures), SamplingParams())


def test_a_request_is_refused_until_another_one_ends() -> None:
    places = PicturePlaces(4)
    first = with_pictures(asked(3), places)
    second = asked(2)
    with pytest.raises(RejectedError, match="there would be 5 pictures, and at most 4") as refused:
        with_pictures(second, places)
    assert refused.value.reason is RejectReason.QUEUE_FULL
    last = with_pictures(asked(1), places)
    assert [len(each.input.pictures) for each in (first, last)] == [3, 1]
    del first
    assert with_pictures(second, places) == second


def test_a_request_that_never_fits_is_left_to_the_check_of_requests() -> None:
    """There it is the caller's fault, and not one of the moment."""
    places = PicturePlaces(4)
    many = asked(5)
    assert with_pictures(many, places) == many
