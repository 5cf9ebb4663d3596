"""The values of pictures are in memory that a server shares until the engine takes them."""

import os

import pytest
from msgspec.structs import replace

from weft.engine.loop.pending import RejectedError
from weft.engine.vision.shared import with_pictures
from weft.engine.wire.inputs import TokensInput, TokenSpan
from weft.engine.wire.messages import AddRequest
from weft.engine.wire.params import SamplingParams
from weft.engine.wire.pictures import Picture, PictureArray, SharedData


def asked(*pictures: Picture) -> AddRequest:
    spans = [TokenSpan(i, 1, b"x") for i in range(len(pictures))]
    return AddRequest(TokensInput([5] * 4, spans=spans, pictures=[*pictures]), SamplingParams())


def test_the_engine_takes_them_and_needs_the_memory_no_more() -> None:
    number = os.memfd_create("test")
    os.write(number, b"12345678")
    place = SharedData(os.getpid(), number, 8, os.fstat(number).st_ino)
    shared = Picture(5, {"x": PictureArray("float32", (2,))}, shared=place)
    own = replace(shared, data=b"abcdefgh", shared=None)
    assert (shared.num_bytes, own.num_bytes) == (8, 8)
    taken = with_pictures(asked(shared, own)).input
    os.close(number)
    assert isinstance(taken, TokensInput) and [each.data for each in taken.pictures] == [b"12345678", b"abcdefgh"]
    assert taken.fault(10) == "this model takes no pictures"


def test_memory_that_is_gone_is_one_requests_fault() -> None:
    with pytest.raises(RejectedError, match="a picture is not there"):
        with_pictures(asked(Picture(5, {}, shared=SharedData(os.getpid(), 1 << 20, 8, 0))))


def test_memory_that_has_the_number_of_another_is_not_read() -> None:
    first = os.memfd_create("first")
    place = SharedData(os.getpid(), first, 8, os.fstat(first).st_ino)
    os.close(first)
    second = os.memfd_create("second")
    assert second == first
    with pytest.raises(RejectedError, match="a picture is not there"):
        with_pictures(asked(Picture(5, {}, shared=place)))
    os.close(second)


def test_a_request_without_pictures_is_the_same() -> None:
    add = asked()
    assert with_pictures(add) is add
