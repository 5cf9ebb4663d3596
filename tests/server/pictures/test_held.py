"""What is held of pictures is bounded in bytes and in number, shared among keys, and let go when nobody has it."""

import errno
import gc
import os
import resource

import pytest

from weft.server.errors import QueueFullError
from weft.server.pictures import held
from weft.server.pictures.calls import Made
from weft.server.pictures.held import HeldPictures, ReadPicture


def memory() -> int:
    return os.memfd_create("weft-test")


def hold(pictures: HeldPictures, name: str, num_bytes: int = 10, tenant: str = "a") -> ReadPicture:
    made = Made(text="x", placeholder="x", num_tokens=1, num_bytes=num_bytes)
    return pictures.hold((tenant, name.encode()), made, "x", 7, memory)


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> HeldPictures:
    monkeypatch.setattr(held, "MAX_HELD_BYTES", 100)
    return HeldPictures()


def numbers(pictures: HeldPictures) -> list[int]:
    return [shared.number for shared in pictures._held]


def test_a_key_has_at_most_as_many_bytes_as_are_left(pictures: HeldPictures) -> None:
    first = [hold(pictures, f"{i}") for i in range(5)]
    with pytest.raises(QueueFullError, match="it holds 50, 50 are left, and one has 10; try again") as caught:
        hold(pictures, "6")
    assert caught.value.status == 503
    second = [hold(pictures, f"{i}", tenant="b") for i in range(2)]
    with pytest.raises(QueueFullError, match="it holds 20, 30 are left, and one has 11"):
        hold(pictures, "3", 11, tenant="b")
    first.clear()
    second += [hold(pictures, f"{i + 3}", tenant="b") for i in range(3)]


def test_a_key_has_at_most_as_many_files_as_are_left(pictures: HeldPictures, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (16 * 4, 16 * 4))
    first = [hold(pictures, f"{i}", 1) for i in range(2)]
    with pytest.raises(QueueFullError, match=r"at most 4 pictures may be held at once, .* it holds 2"):
        hold(pictures, "3", 1)
    second = hold(pictures, "1", 1, tenant="b")
    with pytest.raises(QueueFullError):
        hold(pictures, "2", 1, tenant="b")
    del first[0], second
    hold(pictures, "4", 1)


def test_no_file_may_be_left_at_all(pictures: HeldPictures) -> None:
    def full() -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with pytest.raises(QueueFullError, match=r"a picture cannot be held \(Too many open files\); try again"):
        pictures.hold(("a", b"1"), Made(num_bytes=1), "x", 7, full)
    assert not pictures._held


def test_what_nobody_has_any_more_is_let_go(pictures: HeldPictures) -> None:
    found = hold(pictures, "1")
    assert pictures.find(("a", b"1")) is found and pictures.find(("b", b"1")) is None
    (number,) = numbers(pictures)
    pictures.forget()
    os.fstat(number)
    del found
    assert not pictures._held
    with pytest.raises(OSError):
        os.fstat(number)


def test_what_is_only_kept_makes_room_the_oldest_first(pictures: HeldPictures) -> None:
    for i in range(5):
        hold(pictures, f"{i}")
    assert pictures.find(("a", b"0")) is not None
    hold(pictures, "5")
    assert pictures.find(("a", b"1")) is None and pictures.find(("a", b"0")) is not None


def test_what_is_kept_has_a_bound_of_its_own(pictures: HeldPictures, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "MAX_KEPT_BYTES", 20)
    for i in range(3):
        hold(pictures, f"{i}")
    assert len(numbers(pictures)) == 2 and pictures.find(("a", b"0")) is None


def test_a_key_beyond_its_share_takes_nothing_from_others(pictures: HeldPictures) -> None:
    for i in range(3):
        hold(pictures, f"{i}", tenant="b")
    has = [hold(pictures, f"{i}", 15) for i in range(2)]
    hold(pictures, "kept")
    with pytest.raises(QueueFullError):
        hold(pictures, "2", 45)
    assert [pictures.find(("b", b"%d" % i)) is not None for i in range(3)] == [True] * 3
    hold(pictures, "2", 15)  # what it keeps itself has gone first
    assert pictures.find(("a", b"kept")) is None and pictures.find(("b", b"2")) is not None
    hold(pictures, "3", 25)  # for which one of the others' has to go
    assert pictures.find(("b", b"0")) is None and len(has) == 2


def test_a_picture_that_cannot_be_kept_leaves_the_others(
    pictures: HeldPictures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held, "MAX_KEPT_BYTES", 20)
    hold(pictures, "1")
    assert hold(pictures, "2", 21).picture is not None
    assert pictures.find(("a", b"1")) is not None and pictures.find(("a", b"2")) is None


def test_pictures_may_go_while_room_is_looked_for(pictures: HeldPictures, monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector may run at any time, also in the thread that has the lock."""

    def collected(which: int) -> tuple[int, int]:
        gc.collect()
        return 1024, 1024

    monkeypatch.setattr(resource, "getrlimit", collected)
    for i in range(3):
        (circle := list[object]([hold(pictures, f"{i}")])).append(circle)
        pictures.forget()
    del circle
    last = hold(pictures, "last")
    hold(pictures, "another")
    assert (pictures._all_bytes, pictures._num_all, len(pictures._held)) == (20, 2, 2) and last.picture is not None


def test_faults_are_remembered_for_a_while(pictures: HeldPictures, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "MAX_FAULTS", 2)
    fault = ReadPicture(Made("it is damaged"), "x", None)
    for name in (b"1", b"2", b"3"):
        pictures.keep_fault(("a", name), fault)
    found = [pictures.find((tenant, name)) for tenant, name in (("a", b"1"), ("a", b"2"), ("a", b"3"), ("b", b"3"))]
    assert found == [None, fault, fault, None]
    monkeypatch.setattr(held, "FAULTS_S", -1.0)
    pictures.keep_fault(("a", b"3"), fault)
    assert pictures.find(("a", b"3")) is None
    pictures.forget()
    assert pictures.find(("a", b"2")) is None
