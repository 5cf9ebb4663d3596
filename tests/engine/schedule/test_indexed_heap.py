from hypothesis import given
from hypothesis import strategies as st

from weft.engine.schedule.waiting_queue import IndexedHeap

OPERATIONS = st.lists(st.tuples(st.sampled_from(["push", "discard"]), st.integers(0, 9), st.integers(0, 5)))


@given(OPERATIONS)
def test_it_is_a_sorted_dict(operations: list[tuple[str, int, int]]) -> None:
    heap: IndexedHeap[int, str] = IndexedHeap()
    model: dict[int, tuple[int, int]] = {}
    for number, (operation, key, order) in enumerate(operations):
        if operation == "push":
            heap.push(key, order, f"{key}:{number}")
            model[key] = (order, number)
        else:
            heap.discard(key)
            model.pop(key, None)
        assert len(heap) == len(model)
        assert set(heap) == {f"{key}:{number}" for key, (_, number) in model.items()}
        assert (key in heap) == (key in model)
        first = min(model, key=lambda key: model[key], default=None)
        assert heap.first() == (None if first is None else (model[first][0], f"{first}:{model[first][1]}"))


def test_what_is_stale_takes_a_bounded_part_of_the_memory() -> None:
    heap: IndexedHeap[int, int] = IndexedHeap()
    for number in range(10_000):
        heap.push(number, number, number)
        if number >= 10:
            heap.discard(number - 5)  # never the first, which would be cleaned up by the way
    assert len(heap) == 10
    assert len(heap._heap) <= 100
