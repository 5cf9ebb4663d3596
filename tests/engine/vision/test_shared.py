"""The values of pictures are in memory that a server shares, and are read there when they are encoded."""

import fcntl
import os

import pytest
import torch

from weft.engine.loop.sight import PictureError
from weft.engine.vision.eyes import tensors
from weft.engine.vision.shared import values_of
from weft.engine.wire.inputs import InputLimits, TokensInput, TokenSpan
from weft.engine.wire.pictures import SEALS, Picture, PictureArray, SharedData

ARRAYS = {"x": PictureArray("float32", (2,)), "y": PictureArray("bool", (1,), 8), "z": PictureArray("int64", (1,), 9)}
VALUES = b"\0\0\x80\x3f\0\0\0\x40" + b"\1" + (7).to_bytes(8, "little")


def shared(content: bytes = VALUES, *, seals: int = SEALS) -> SharedData:
    number = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.write(number, content)
    fcntl.fcntl(number, fcntl.F_ADD_SEALS, seals)
    return SharedData(os.getpid(), number, len(content), os.fstat(number).st_ino)


def num_mapped() -> int:
    with open("/proc/self/maps") as file:
        return sum("memfd:test" in line for line in file)


def test_they_are_read_where_they_are_and_mapped_no_longer_than_that() -> None:
    place = shared()
    values = values_of(Picture(5, ARRAYS, shared=place))
    os.close(place.number)  # as when the server is killed
    assert bytes(values) == VALUES and num_mapped() == 1
    del values
    assert num_mapped() == 0


def test_tensors_are_the_memory_itself_but_for_values_between_words() -> None:
    place = shared()
    found = tensors(Picture(5, ARRAYS, shared=place), torch.device("cpu"))
    os.close(place.number)
    assert [each.tolist() for each in found.values()] == [[1.0, 2.0], [True], [7]]
    assert num_mapped() == 1 and found["z"].data_ptr() % 8 == 0
    found["x"] += 1  # is nobody else's
    found.clear()
    assert num_mapped() == 0
    own = tensors(Picture(5, ARRAYS, VALUES), torch.device("cpu"))
    assert [each.tolist() for each in own.values()] == [[1.0, 2.0], [True], [7]]


def test_memory_that_is_gone_is_not_there() -> None:
    with pytest.raises(PictureError, match=r"a picture is not there \(No such file"):
        values_of(Picture(5, {}, shared=SharedData(os.getpid(), 1 << 20, 8, 0)))


def test_memory_that_has_the_number_of_another_is_not_read() -> None:
    first = shared()
    os.close(first.number)
    second = shared()
    assert second.number == first.number
    with pytest.raises(PictureError, match="a picture is not there"):
        values_of(Picture(5, {}, shared=first))
    os.close(second.number)


@pytest.mark.parametrize("seals", [0, SEALS & ~fcntl.F_SEAL_SHRINK, SEALS & ~fcntl.F_SEAL_WRITE])
def test_memory_that_may_change_is_not_mapped(seals: int) -> None:
    """To cut it would have ended the engine by SIGBUS."""
    place = shared(seals=seals)
    with pytest.raises(PictureError, match="a picture is in memory that may change"):
        values_of(Picture(5, {}, shared=place))
    os.close(place.number)


def test_memory_that_is_shorter_than_said_is_not_mapped() -> None:
    place = shared(b"1234")
    longer = SharedData(place.process, place.number, 5, place.inode)
    with pytest.raises(PictureError, match="may change"):
        values_of(Picture(5, {}, shared=longer))
    os.close(place.number)


def test_a_request_is_checked_before_anything_is_read() -> None:
    nowhere = SharedData(os.getpid(), 1 << 20, len(VALUES), 0)
    given = TokensInput([5] * 4, spans=[TokenSpan(0, 1, b"x")], pictures=[Picture(5, ARRAYS, shared=nowhere)])
    assert given.fault(10) == "this model takes no pictures"
    assert given.fault(10, InputLimits(picture_token=5)) is None
    beyond = Picture(5, {"x": PictureArray("float32", (5,))}, shared=nowhere)
    fault = TokensInput(given.token_ids, spans=given.spans, pictures=[beyond]).fault(10, InputLimits(picture_token=5))
    assert fault is not None and fault.startswith("x must be whole")
