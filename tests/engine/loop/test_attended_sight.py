"""Pictures that layers attend to, which a request needs to its end: around a fake model and a fake encoder."""

import random
from itertools import islice
from typing import Any

import pytest
from msgspec.structs import replace

from tests.engine.loop.test_sight import PICTURE_TOKEN, Part, Seeing, asked, expected, ids, steps
from tests.engine.runs import run
from weft.engine.wire.inputs import InputLimits, TokensInput
from weft.engine.wire.messages import AddRequest


class Attending(Seeing):
    def __init__(self, room: int, **options: Any) -> None:
        super().__init__(room, **options)
        self.engine._limits = InputLimits(picture_token=PICTURE_TOKEN, max_attended=8)


def attended(number: int, *parts: int | str, **more: Any) -> AddRequest:
    """A request whose pictures are one token each."""
    spans: list[Part] = [(part, 1) if isinstance(part, str) else part for part in parts]
    add = asked(number, *spans, **more)
    assert isinstance(add.input, TokensInput)
    pictures = [replace(picture, is_attended=True) for picture in add.input.pictures]
    return replace(add, input=replace(add.input, pictures=pictures))


def test_pictures_stay_as_long_as_the_request_runs() -> None:
    """Others have pictures encoded meanwhile, beyond the room; the checked runner says if one was dropped."""
    seeing = Attending(room=3, max_num_batched_tokens=8)
    adds = [attended(0, "a", "b", 3, max_tokens=30), *(attended(n, str(n), 4, max_tokens=2) for n in range(1, 6))]
    assert ids(run(seeing.engine, adds)) == expected(*adds)
    assert sorted(seeing.features.encoded) == [*"12345", "a", "b"]


def test_pictures_that_no_later_token_sees_go() -> None:
    seeing = Attending(room=1, prefix_caching=False)
    add = attended(0, "a", 1, "b", 1, "c", 1, max_tokens=9)
    assert ids(run(seeing.engine, [add])) == expected(add)
    assert seeing.features.encoded == ["a", "b", "c"] and seeing.features.most == 2


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_requests", [2, 4])
def test_requests_that_do_not_fit_together_do_not_wait_for_ever(overlap: bool, num_requests: int) -> None:
    """They took turns until none had all of its pictures, and no room was left."""
    seeing = Attending(room=4, overlap=overlap)
    adds = [attended(n, *(f"{name}{i}" for i in range(4)), 5) for n, name in enumerate("abcd"[:num_requests])]
    text = asked(9, 1, 2, 3, max_tokens=60)
    for add in (text, *adds):
        seeing.engine.add(0, add)
    found: dict[tuple[int, int], list[int]] = {}
    for outputs in islice(steps(seeing), 500):
        for key, output in outputs.items():
            found.setdefault(key, []).extend(output.token_ids)  # type: ignore[attr-defined]
        others = [key for key in found if key != (9, 0)]
        assert len(others) == num_requests or len(found.get((9, 0), [])) < 60  # a long text is not waited for
    assert found == expected(text, *adds)
    assert seeing.features.most <= 5


def test_behind_a_cached_prefix_all_pictures_are_waited_for() -> None:
    """Its first token needs four at once, which the stream leaves no room for, so they are not made again and again."""
    seeing = Attending(room=6)
    first, stream = attended(0, *"abcd", 1, 2, 3, 4, max_tokens=20), attended(1, *"efgh", 5, max_tokens=40)
    run(seeing.engine, [first])
    seeing.engine.add(0, stream)
    while len(seeing.features.encoded) < 8:
        seeing.engine.step()
    second = attended(2, *"abcd", 1, 2, 3, 4, 5, 6)
    outputs = run(seeing.engine, [second])
    assert list(outputs[2, 0].token_ids) == expected(second)[2, 0]  # type: ignore[attr-defined]
    assert outputs[2, 0].num_cached_tokens  # type: ignore[attr-defined]
    assert len(seeing.features.encoded) <= 12 and seeing.features.most <= 7


def test_two_behind_cached_prefixes_do_not_take_from_each_other() -> None:
    """The first token of each needs four pictures, and there is room for five."""
    seeing = Attending(room=5)
    adds = [attended(n, *names, 1, 2, 3, 4, 5, 6) for n, names in enumerate(("abcd", "efgh"))]
    for add in adds:
        run(seeing.engine, [add])
    seeing.engine.sight._kept.clear()
    seeing.features.kept.clear()
    assert ids(run(seeing.engine, adds)) == expected(*adds)
    assert len(seeing.features.encoded) == 16


@pytest.mark.parametrize("seed", range(24))
def test_any_mixture_goes_on_as_without_pictures(seed: int) -> None:
    draw = random.Random(seed)
    seeing = Attending(
        room=(room := draw.choice([1, 3, 8])),
        overlap=draw.random() < 0.5,
        num_blocks=draw.choice([14, 20, 64]),
        max_num_batched_tokens=draw.choice([9, 20, 64]),
        prefix_caching=draw.random() < 0.5,
    )
    adds = []
    for number in range(12):
        parts = [draw.choice("abcdefgh") if draw.random() < 0.5 else draw.randrange(8, 50) for _ in range(8)]
        choices, length = draw.choice([1, 1, 2]), draw.randrange(1, 20)
        adds.append(attended(number, *parts, num_choices=choices, max_tokens=length))
    waiting, gained = list(adds), dict[tuple[int, int], list[int]]()
    for _ in range(5000):
        if waiting and draw.random() < 0.4:
            seeing.engine.add(0, waiting.pop(0))
        for _, output in seeing.engine.step():
            gained.setdefault((output.request_id, output.index), []).extend(output.token_ids)  # type: ignore[attr-defined]
        seeing.engine.scheduler.check_integrity()
        if not waiting and not seeing.engine.has_work:
            break
    assert gained == expected(*adds)
    assert seeing.features.most <= max(room, 8) + 1  # a request may see eight at once
    assert seeing.engine.scheduler.kv.pools[0].num_used == 0 and not seeing.engine.sight._awaited
