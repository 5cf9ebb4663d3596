"""Which picture is encoded between two steps, and which features are kept: around a fake model and a fake encoder."""

import random
from collections.abc import Iterator

import pytest
import torch

from tests.engine.cache.host_tier import HostTier
from tests.engine.fake_runner import FakeEngine, make_engine
from tests.engine.runs import Outputs, run
from weft.engine.loop.sight import Features, PictureError, Sight
from weft.engine.wire.inputs import InputLimits, TokensInput, TokenSpan
from weft.engine.wire.messages import AddRequest, FinishReason
from weft.engine.wire.params import SamplingParams
from weft.engine.wire.pictures import Picture

PICTURE_TOKEN = 7
BYTES = 100
"""Of the features of every picture."""
Part = int | tuple[str, int]
"""A token, or a picture and how many tokens it has."""


class FakeFeatures(Features):
    """Notes what is encoded. Each picture in `broken` raises its error."""

    def __init__(self) -> None:
        self.encoded: list[str] = []
        self.kept: set[bytes] = set()
        self.most = 0
        self.broken: dict[str, Exception] = {}
        self.num_pauses = 0

    def encode(self, key: bytes, picture: Picture, num_features: int) -> Iterator[tuple[int, float] | None]:
        name = picture.data.decode()
        if name in self.broken:
            raise self.broken[name]
        assert key not in self.kept
        self.encoded.append(name)
        self.kept.add(key)
        self.most = max(self.most, len(self.kept))
        yield from [None] * self.num_pauses
        yield BYTES, 0.25

    def drop(self, key: bytes) -> None:
        self.kept.remove(key)


class Seeing:
    """An engine with pictures, whose runner checks that the features of every step are there."""

    def __init__(self, room: int = 100, **options: object) -> None:
        self.fake: FakeEngine = make_engine(**options)  # type: ignore[arg-type]
        self.engine, self.features = self.fake.engine, FakeFeatures()
        self.engine._limits = InputLimits(picture_token=PICTURE_TOKEN)
        runner = self.fake.runner
        self.engine.sight = Sight(self.engine.scheduler, self.features, runner.check_device, room * BYTES)
        launch = runner.launch

        def checked(batch: object, masks: object = None) -> object:
            assert {part.key for part in batch.pictures} <= self.features.kept  # type: ignore[attr-defined]
            return launch(batch, masks)  # type: ignore[arg-type]

        runner.launch = checked  # type: ignore[assignment, method-assign]

    @property
    def counters(self) -> tuple[int, int]:
        counters = self.engine.scheduler.counters
        return counters.pictures_encoded, counters.picture_hits


def asked(number: int, *parts: Part, num_choices: int = 1, max_tokens: int = 5, **more: object) -> AddRequest:
    ids, spans, pictures = list[int](), list[TokenSpan](), list[Picture]()
    for part in parts:
        if isinstance(part, int):
            ids.append(part)
            continue
        name, num_tokens = part
        spans.append(TokenSpan(len(ids), num_tokens, name.encode()))
        pictures.append(Picture(PICTURE_TOKEN, {}, name.encode()))
        ids += [PICTURE_TOKEN] * num_tokens
    given = TokensInput(ids, spans=spans, pictures=pictures)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return AddRequest(given, params, request_id=number, num_choices=num_choices, **more)  # type: ignore[arg-type]


def plain(add: AddRequest) -> AddRequest:
    """The same ids without pictures, which the fake model goes on from alike."""
    return AddRequest(
        TokensInput(add.input.token_ids), add.sampling_params, request_id=add.request_id, num_choices=add.num_choices
    )


def expected(*adds: AddRequest) -> dict[tuple[int, int], list[int]]:
    return ids(run(make_engine(prefix_caching=False).engine, [plain(add) for add in adds]))


def ids(outputs: Outputs) -> dict[tuple[int, int], list[int]]:
    return {key: list(output.token_ids) for key, output in outputs.items()}  # type: ignore[attr-defined]


def steps(seeing: Seeing) -> Iterator[Outputs]:
    """What each call of `step` returns, until nothing is left."""
    while seeing.engine.has_work:
        yield {(o.request_id, o.index): o for _, o in seeing.engine.step()}
        seeing.engine.scheduler.check_integrity()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_stream_goes_on_between_pictures(overlap: bool) -> None:
    """All new pictures of a step were encoded within it, however many there were."""
    seeing = Seeing(overlap=overlap)
    stream, add = asked(0, 1, 2, max_tokens=40), asked(1, ("a", 4), 5, ("b", 3), ("c", 2))
    seeing.engine.add(0, stream)
    seeing.engine.step()
    seeing.engine.add(0, add)
    merged: dict[tuple[int, int], list[int]] = {}
    num_streamed = [0]  # tokens of the stream before each picture
    for outputs in steps(seeing):
        for key, output in outputs.items():
            merged.setdefault(key, []).extend(output.token_ids)  # type: ignore[attr-defined]
        num_streamed += [len(merged.get((0, 0), []))] * (len(seeing.features.encoded) + 1 - len(num_streamed))
    assert seeing.features.encoded == ["a", "b", "c"]
    assert num_streamed[0] < num_streamed[1] < num_streamed[2] < num_streamed[3] < 40
    assert merged[1, 0] == expected(add)[1, 0]
    assert merged[0, 0] == expected(stream)[0, 0][-len(merged[0, 0]) :]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_stream_goes_on_between_parts_of_a_picture(overlap: bool) -> None:
    seeing = Seeing(overlap=overlap)
    seeing.features.num_pauses = 5
    stream, add = asked(0, 1, 2, max_tokens=40), asked(1, ("a", 4), 5)
    seeing.engine.add(0, stream)
    seeing.engine.step()
    seeing.engine.add(0, add)
    merged: dict[tuple[int, int], list[int]] = {}
    num_before = 0
    for outputs in steps(seeing):
        for key, output in outputs.items():
            merged.setdefault(key, []).extend(output.token_ids)  # type: ignore[attr-defined]
        num_before = num_before if (1, 0) in merged else len(merged.get((0, 0), []))
    assert num_before >= 5
    assert merged[1, 0] == expected(add)[1, 0]
    assert merged[0, 0] == expected(stream)[0, 0][-len(merged[0, 0]) :]


def test_who_leaves_within_a_picture_leaves_nothing_under_way() -> None:
    seeing = Seeing()
    seeing.features.num_pauses = 3
    seeing.engine.add(0, asked(0, ("a", 4), 5))
    seeing.engine.step()
    assert seeing.engine.sight.is_awaited
    seeing.engine.abort(0, 0, None)
    other = asked(1, ("b", 3), 5)
    assert ids(run(seeing.engine, [other])) == expected(other)
    assert not seeing.engine.sight.is_awaited


def test_requests_take_turns() -> None:
    seeing = Seeing()
    adds = [asked(n, *((f"{name}{i}", 3) for i in range(3)), 5) for n, name in enumerate("ab")]
    assert ids(run(seeing.engine, adds)) == expected(*adds)
    assert seeing.features.encoded == ["a0", "b0", "a1", "b1", "a2", "b2"]


def test_who_waits_for_a_picture_delays_nobody_behind() -> None:
    seeing = Seeing()
    for add in (asked(0, ("a", 3)), asked(1, 1, 2)):
        seeing.engine.add(0, add)
    seeing.engine.step()
    assert [r.key.request_id for r in seeing.engine.scheduler.running] == [1]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (PictureError("a picture has 3 tokens, and 4 features"), "a picture has 3 tokens, and 4 features"),
        (ZeroDivisionError(), "a picture cannot be encoded: ZeroDivisionError"),
        (torch.OutOfMemoryError(), "a picture cannot be encoded: the device ran out of memory"),
    ],
)
@pytest.mark.parametrize("parts", [[("x", 3), 4], [1, 2, ("a", 2), 3, ("x", 3), 4]])
@pytest.mark.parametrize("num_choices", [1, 2])
def test_a_picture_that_cannot_be_encoded_ends_one_request(
    error: Exception, message: str, parts: list[Part], num_choices: int
) -> None:
    """An error of the encoder, or a wrong number of features, ended all requests of the step."""
    seeing = Seeing(prefix_caching=False)
    seeing.features.broken["x"] = error
    others = [asked(0, 1, 2, 3, max_tokens=9), asked(2, ("b", 3), 4), asked(3, 1, ("a", 2), ("c", 2))]
    outputs = run(seeing.engine, [others[0], asked(1, *parts, num_choices=num_choices), *others[1:]])
    for index in range(num_choices):
        failed = outputs.pop((1, index))
        assert (failed.finish_reason, failed.message) == (FinishReason.ERROR, message)  # type: ignore[attr-defined]
    assert ids(outputs) == expected(*others)
    assert "x" not in seeing.features.encoded and seeing.engine.scheduler.kv.pools[0].num_used == 0


def test_a_lost_device_is_the_end_of_the_engine() -> None:
    seeing = Seeing()
    seeing.features.broken["a"] = RuntimeError("an illegal memory access was encountered")
    seeing.engine.add(0, asked(0, ("a", 3)))
    seeing.engine.step()
    seeing.fake.runner.is_device_lost = True
    with pytest.raises(RuntimeError, match="illegal"):
        seeing.engine.step()


@pytest.mark.parametrize("parts", [[("a", 3), 4], [1, 2, ("a", 3), 4]])
def test_of_a_request_that_ends_waiting_nothing_is_encoded(parts: list[Part]) -> None:
    seeing = Seeing()
    seeing.engine.add(0, asked(0, *parts))
    seeing.engine.step()
    assert seeing.engine.sight.is_awaited
    seeing.engine.abort(0, 0)
    assert not seeing.engine.has_work
    assert seeing.engine.step() == [] and not seeing.engine.sight.is_awaited
    assert seeing.features.encoded == [] and seeing.engine.scheduler.kv.pools[0].num_used == 0


def test_of_a_request_that_ends_in_a_picture_nothing_is_held() -> None:
    seeing = Seeing(room=1, max_num_batched_tokens=9)
    seeing.engine.add(0, asked(0, ("a", 30), 4))
    seeing.engine.step()
    seeing.engine.step()
    assert seeing.features.encoded == ["a"] and seeing.engine.scheduler.running
    seeing.engine.abort(0, 0)
    assert not seeing.engine.has_work and seeing.engine.scheduler.kv.pools[0].num_used == 0
    run(seeing.engine, [asked(1, ("b", 3), 4)])
    assert len(seeing.features.kept) == 1


@pytest.mark.parametrize(("prefix_caching", "num_hits"), [(False, 1), (True, 0)])
def test_requests_with_one_picture_have_it_encoded_once(prefix_caching: bool, num_hits: int) -> None:
    """With the prefix cache the second one computes no token of it."""
    seeing = Seeing(prefix_caching=prefix_caching)
    adds = [asked(n, 1, ("a", 7), n) for n in range(2)]
    assert ids(run(seeing.engine, adds)) == expected(*adds)
    assert seeing.counters == (1, num_hits)


def test_who_shares_no_prefix_shares_no_features() -> None:
    seeing = Seeing()
    run(seeing.engine, [asked(0, ("a", 3)), asked(1, ("a", 3), cache_salt="other"), asked(2, ("a", 4))])
    assert seeing.features.encoded == ["a"] * 3


def test_a_prefix_that_a_tier_has_is_loaded_and_not_seen_again() -> None:
    seeing = Seeing(num_blocks=10, tier=(tier := HostTier()), room=1)
    run(seeing.engine, [asked(0, 1, ("a", 10), 2)])
    run(seeing.engine, [asked(1, *range(10, 34), ("b", 3), max_tokens=1)])  # takes all blocks, and the room
    seeing.engine.add(0, add := asked(2, 1, ("a", 10), 2, 3, 4))
    found: list[int] = []
    for outputs in steps(seeing):
        tier.work()
        found += [i for output in outputs.values() for i in output.token_ids]  # type: ignore[attr-defined]
    assert found == expected(add)[2, 0]
    assert tier.num_loaded and seeing.features.encoded == ["a", "b"]


def test_features_that_a_running_request_needs_next_stay() -> None:
    """There is room for one picture, and each prompt takes several steps."""
    seeing = Seeing(room=1, max_num_batched_tokens=6, prefix_caching=False)
    adds = [asked(n, 1, (f"{name}0", 11), 2, (f"{name}1", 9)) for n, name in enumerate("abc")]
    assert ids(run(seeing.engine, adds)) == expected(*adds)
    assert sorted(seeing.features.encoded) == ["a0", "a1", "b0", "b1", "c0", "c1"]
    assert seeing.features.most == 2  # that which is encoded goes beyond the room


def test_features_that_are_needed_later_go_last() -> None:
    seeing = Seeing(room=3, prefix_caching=False, max_num_batched_tokens=8)
    run(seeing.engine, [asked(0, ("a", 3), ("b", 3), ("c", 3))])
    seeing.engine.add(0, asked(1, 1, ("c", 20), 1, ("a", 3)))  # other features than those of c before
    seeing.engine.add(0, asked(2, ("d", 3), 1))
    for _ in steps(seeing):
        pass
    assert seeing.features.encoded == ["a", "b", "c", "c", "d"]


@pytest.mark.parametrize(("is_kept", "encoded"), [(False, "abb"), (True, "ab")])
def test_a_preempted_request_sees_again(is_kept: bool, encoded: str) -> None:
    """If its features are gone by then, they are made anew."""
    seeing = Seeing(num_blocks=12, prefix_caching=False)
    seeing.engine.scheduler.mean_output_tokens = 0.0  # too much is begun
    adds = [asked(0, 0, ("a", 10), 5, max_tokens=20), asked(1, 1, ("b", 10), 5, max_tokens=20)]
    merged: dict[tuple[int, int], list[int]] = {}
    for add in adds:
        seeing.engine.add(0, add)
    for outputs in steps(seeing):
        for key, output in outputs.items():
            merged.setdefault(key, []).extend(output.token_ids)  # type: ignore[attr-defined]
        if not is_kept and seeing.engine.scheduler.counters.num_preemptions and len(seeing.features.encoded) == 2:
            seeing.engine.sight._kept.clear()
            seeing.features.kept.clear()
    assert merged == expected(*adds) and seeing.engine.scheduler.counters.num_preemptions == 1
    assert "".join(seeing.features.encoded) == encoded


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_choices", [1, 3])
@pytest.mark.parametrize("last", [1, 4])
def test_a_picture_may_end_a_prompt(overlap: bool, num_choices: int, last: int) -> None:
    """The last token of a prompt is computed like a decode, and by every choice again."""
    seeing = Seeing(room=1, overlap=overlap)
    prompts = [(1, 2, (f"{name}0", 2), 3, (f"{name}1", last)) for name in "ab"]
    adds = [asked(number, *prompt, num_choices=num_choices) for number, prompt in enumerate(prompts)]
    assert ids(run(seeing.engine, adds)) == expected(*adds)


def test_a_picture_is_cut_at_every_place() -> None:
    add = asked(0, 1, 2, 3, ("a", 9), 4, ("b", 6))
    for most in range(1, 12):
        seeing = Seeing(max_num_batched_tokens=most, max_num_seqs=1)
        assert ids(run(seeing.engine, [add])) == expected(add)
        assert seeing.features.encoded == ["a", "b"]


def test_a_picture_may_take_as_long_as_the_largest_one_tells() -> None:
    seeing, told = Seeing(), []
    seeing.engine.sight.before_encode = lambda request, seconds: told.append((request.key.request_id, seconds))
    for number, name in enumerate(("ab", "abcd", "a", "abcdefgh")):
        run(seeing.engine, [asked(number, (name, 3))])
    assert told == [(0, 0.0), (1, 0.5), (2, 0.25), (3, 0.5)]
    counters = seeing.engine.scheduler.counters
    assert (counters.picture_seconds, counters.pictures_within_100_ms, counters.pictures_within_300_ms) == (1.0, 0, 4)
    assert counters.step_seconds < 1.0 and counters.pictures_encoded == 4


@pytest.mark.parametrize("seed", range(12))
def test_any_mixture_goes_on_as_without_pictures(seed: int) -> None:
    """Little room, few blocks, small steps, requests that end early: features are there, and nothing is left."""
    draw = random.Random(seed)
    seeing = Seeing(
        room=draw.choice([1, 2, 5]),
        overlap=draw.random() < 0.5,
        num_blocks=draw.choice([14, 20, 64]),
        max_num_batched_tokens=draw.choice([9, 20, 64]),
        prefix_caching=draw.random() < 0.5,
    )
    adds, gained = [], dict[tuple[int, int], list[int]]()
    for number in range(12):
        parts: list[Part] = []
        for _ in range(draw.randrange(1, 4)):
            part: Part = (draw.choice("abcdef"), draw.randrange(1, 9)) if draw.random() < 0.6 else draw.randrange(8, 50)
            parts.append(part)
        adds.append(asked(number, *parts, num_choices=draw.choice([1, 1, 2]), max_tokens=draw.randrange(1, 9)))
    aborted = set[int]()
    waiting = list(adds)
    while waiting or seeing.engine.has_work:
        if waiting and draw.random() < 0.4:
            seeing.engine.add(0, waiting.pop(0))
        if draw.random() < 0.05:
            aborted.add(number := draw.randrange(12))
            seeing.engine.abort(0, number)
        for _, output in seeing.engine.step():
            gained.setdefault((output.request_id, output.index), []).extend(output.token_ids)  # type: ignore[attr-defined]
        seeing.engine.scheduler.check_integrity()
    for key, found in expected(*adds).items():
        assert key[0] in aborted or gained[key] == found
    assert seeing.engine.scheduler.kv.pools[0].num_used == 0 and not seeing.engine.sight._awaited
