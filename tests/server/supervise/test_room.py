from weft.server.supervise.memory_shares import EvictionPlan, MemoryNeed

ROOM = EvictionPlan(
    {"cpu": 100, "cuda": 10},
    {
        "base": MemoryNeed("cpu", 40),
        "large": MemoryNeed("cpu", 60),
        "half": MemoryNeed("cpu", 30),
        "other": MemoryNeed("cpu", 25),
        "gpu": MemoryNeed("cuda", 10),
    },
)


def test_what_fits_needs_nobody_to_leave() -> None:
    assert ROOM.lack("half", ["base"]) == -30
    assert ROOM.lack("large", ["base", "gpu"]) == 0
    assert ROOM.lack("large", ["base", "other"]) == 25
    assert ROOM.lack("unplanned", ["base", "large"]) == 0
    assert ROOM.lack("half", ["base", "unplanned"]) == -30


def test_as_many_leave_as_must_in_their_order() -> None:
    there = ["base", "half", "other", "gpu"]
    assert ROOM.leavers("large", there, [], ["gpu", "half", "other"]) == ["half", "other"]
    assert ROOM.leavers("large", there, ["other"], ["half"]) == ["half"]
    assert ROOM.leavers("half", ["base", "large"], ["large"], ["other"]) == []
    assert ROOM.leavers("large", there, [], ["half"]) is None
    assert ROOM.leavers("large", there, [], []) is None
