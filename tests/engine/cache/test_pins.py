from collections.abc import Callable

import pytest

from weft.engine.cache.block_pool import BlockPool
from weft.engine.cache.prefixes import Pins


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    now = [0.0]
    monkeypatch.setattr("weft.engine.cache.prefixes.time.monotonic", lambda: now[0])

    def set_now(seconds: float) -> None:
        now[0] = seconds

    return set_now


def test_pins_end_on_time_and_a_later_end_wins(clock: Callable[[float], None]) -> None:
    pins = Pins([BlockPool(9)], 8)
    pins.add([b"a", b"b"], 10.0)
    pins.add([b"a"], 30.0)
    pins.add([b"b"], 5.0)
    for seconds, left in ((9.0, 2), (10.0, 1), (29.0, 1), (30.0, 0)):
        clock(seconds)
        pins.release_expired()
        assert len(pins) == left


def test_asking_again_and_again_takes_no_more_memory(clock: Callable[[float], None]) -> None:
    pins = Pins([BlockPool(9)], 8)
    for seconds in range(1000):
        clock(float(seconds))
        pins.add([b"a", b"b"], seconds + 10.0)
    assert len(pins._order) == len(pins) == 2


def test_the_end_of_a_prefix_is_left_out_when_there_is_no_room(clock: Callable[[float], None]) -> None:
    pool = BlockPool(9)
    pins = Pins([pool], 2)
    pool.allocate(3)
    for block in (1, 2, 3):
        pool.index(block, b"%d" % block)
        pool.free(block)
    pins.add([b"1", b"2", b"3"], 10.0)
    assert len(pins) == 2
    assert pool.allocate(6) == [4, 5, 6, 7, 8, 3]
    clock(10.0)
    pins.add([b"3"], 20.0)
    assert len(pins) == 1
