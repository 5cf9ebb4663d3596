from hypothesis import given
from hypothesis import strategies as st

from tests.engine.requests_for_tests import request
from weft.engine.request import Request
from weft.engine.schedule.waiting_queue import AGE_S, WaitingQueue
from weft.engine.wire.messages import TIER_WIDTH

FLEX, PRIORITY = TIER_WIDTH, -TIER_WIDTH


def waiting(request_id: int, arrival_s: float, priority: int = 0, deadline: float | None = None) -> Request:
    r = request([1], request_id, priority=priority, deadline=deadline)
    r.arrival_time = arrival_s
    return r


def take_all(queue: WaitingQueue) -> list[int]:
    taken = []
    while (first := queue.first) is not None:
        taken.append(first.key.request_id)
        queue.remove(first)
    return taken


def test_tier_then_priority_then_arrival() -> None:
    queue = WaitingQueue()
    priorities = [FLEX, 5, 0, 0, PRIORITY + 1, PRIORITY]
    for request_id, priority in enumerate(priorities):
        queue.add(waiting(request_id, 0.0, priority), 0.0)
    assert [r.key.request_id for r in queue] == [5, 4, 2, 3, 1, 0]
    assert take_all(queue) == [5, 4, 2, 3, 1, 0]
    assert len(queue) == 0


def test_time_lifts_a_request_by_a_tier_and_those_that_come_later_do_not_pass_it() -> None:
    queue = WaitingQueue()
    queue.add(waiting(0, 0.0, FLEX), 0.0)
    queue.add(waiting(1, 0.0), 0.0)
    for request_id, now_s in ((2, AGE_S - 1), (3, AGE_S + 1), (4, 2 * AGE_S + 1)):
        queue.age(now_s)
        queue.add(waiting(request_id, now_s, PRIORITY), now_s)
        queue.check_integrity()
    assert take_all(queue) == [1, 2, 3, 0, 4]


def test_who_is_preempted_keeps_what_it_has_waited() -> None:
    queue = WaitingQueue()
    old = waiting(0, 0.0)
    queue.add(old, 2.5 * AGE_S)
    assert old.num_lifts == 2


@given(st.lists(st.tuples(st.floats(0.1, 3.0), st.sampled_from([PRIORITY, 0, FLEX])), max_size=60), st.booleans())
def test_nobody_is_passed_by_who_comes_long_after_it(gaps: list[tuple[float, int]], parks: bool) -> None:
    """Whatever comes: a request is overtaken only by those that arrive within AGE_S for each tier between, and one."""
    queue, now_s, requests = WaitingQueue(), 0.0, []
    for request_id, (gap, priority) in enumerate(gaps):
        now_s += gap * AGE_S / 2
        queue.age(now_s)
        requests.append(waiting(request_id, now_s, priority + (7 if request_id % 3 else 0)))
        queue.add(requests[-1], now_s)
        if parks and request_id % 2:
            queue.park(requests[-1], b"%d" % (request_id % 5))
        queue.check_integrity()
        first = queue.first
        for other in requests if first else []:
            tiers = max(0, other.priority // TIER_WIDTH - first.priority // TIER_WIDTH) + 1
            is_ready = other.key in queue._ready
            assert not is_ready or first.arrival_time - other.arrival_time < tiers * AGE_S + 1e-6
    for number in range(5):
        queue.wake(b"%d" % number)
    queue.check_integrity()
    assert len(take_all(queue)) == len(requests)


def test_the_parked_are_passed_over_until_they_are_woken() -> None:
    queue = WaitingQueue()
    requests = [waiting(request_id, 0.0) for request_id in range(4)]
    for r in requests:
        queue.add(r, 0.0)
    queue.park(requests[0], b"a")
    queue.park(requests[1], b"a")
    queue.park(requests[2], b"b")
    assert (queue.first, len(queue)) == (requests[3], 4)
    queue.remove(requests[1])
    queue.age(AGE_S)  # parked ones age, too
    queue.wake(b"a")
    queue.check_integrity()
    assert requests[0].num_lifts == requests[2].num_lifts == 1
    assert take_all(queue) == [0, 3]
    queue.remove(requests[2])
    queue.wake(b"b")
    assert len(queue) == 0
    queue.check_integrity()


def test_who_is_set_aside_comes_back_in_its_place() -> None:
    queue = WaitingQueue()
    for request_id in range(2):
        queue.add(waiting(request_id, 0.0), 0.0)
    first = queue.first
    assert first is not None
    queue.set_aside(first)
    assert queue.first is not first
    queue.bring_back()
    assert take_all(queue) == [0, 1]


def test_deadlines_are_told_once_and_only_of_those_that_never_ran() -> None:
    queue = WaitingQueue()
    ran = waiting(0, 0.0, deadline=1.0)
    ran.num_cached_tokens = 0
    late = [waiting(1, 0.0, deadline=3.0), waiting(2, 0.0, deadline=2.0)]
    for r in (ran, *late, waiting(3, 0.0, deadline=9.0), waiting(4, 0.0)):
        queue.add(r, 0.0)
    assert queue.take_expired(1.5) == []
    assert queue.take_expired(5.0) == [late[1], late[0]]
    assert queue.take_expired(5.0) == []
    assert len(queue) == 5
