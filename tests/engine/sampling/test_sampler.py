import dataclasses
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.native_variants import RUNNABLE, load_variant
from weft.engine.batch import NO_TOKEN_ID, ConditionalBans, PenaltyBatch, Placeholders, RowMasks, SamplingBatch
from weft.engine.kernels.cpu.layer_kernels import NativeSampler
from weft.engine.kernels.torch.layer_kernels import TORCH_SAMPLING, draw, pick_ids
from weft.engine.sampling import sampler
from weft.engine.sampling.edits import apply_penalties
from weft.engine.sampling.sampler import PickIds, SampleResult, SamplingKernels, uniforms
from weft.engine.sampling.scores import token_logprobs

INF = float("inf")
VOCAB_SIZE = 1003  # several chunks, the last one short
CPU = torch.device("cpu")
WAYS = ["torch", *RUNNABLE]


def way(name: str) -> PickIds:
    return pick_ids if name == "torch" else NativeSampler(load_variant(name))


class Sample(Protocol):
    def __call__(
        self,
        logits: torch.Tensor,
        batch: SamplingBatch,
        previous: torch.Tensor | None,
        masks: RowMasks | None = None,
        /,
    ) -> SampleResult: ...


@pytest.fixture(params=WAYS)
def sample(request: pytest.FixtureRequest) -> Sample:
    """`sample` by torch, and by each instruction set that this machine runs."""
    return partial(sampler.sample, kernels=SamplingKernels(apply_penalties, way(request.param)))


def _logits(num_rows: int, vocab_size: int = VOCAB_SIZE, seed: int = 0) -> torch.Tensor:
    values = np.random.default_rng(seed).normal(size=(num_rows, vocab_size)) * 3
    return torch.tensor(values, dtype=torch.float32)


def _reference(
    logits: npt.NDArray[np.float64], temperature: float, top_k: int, top_p: float, min_p: float
) -> npt.NDArray[np.float64]:
    """The distribution that one row is drawn from, written down naively."""
    probs = np.exp((logits - logits.max()) / temperature)
    probs /= probs.sum()
    kept = probs >= min_p * probs.max() * (1 - 1e-9)
    if top_k:
        kept &= logits >= np.sort(logits)[-min(top_k, len(logits))]
    probs = np.where(kept, probs, 0)
    probs /= probs.sum()
    order = np.argsort(-probs, kind="stable")
    num_kept = int((probs[order].cumsum() < top_p).sum()) + 1
    probs[order[num_kept:]] = 0
    return np.asarray(probs / probs.sum())


@settings(max_examples=80, deadline=None, derandomize=True)  # one in 100,000 has a sum that rounds across a bound
@given(
    seed=st.integers(0, 10_000),
    temperature=st.sampled_from([0.01, 0.5, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 5, 300, 5000]),
    top_p=st.sampled_from([1.0, 0.93, 0.31, 0.0]),
    min_p=st.sampled_from([0.0, 0.013, 0.57, 1.0]),
)
@pytest.mark.parametrize("name", WAYS)
def test_ids_invert_the_reference_distribution(
    name: str, seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    num_rows = 8
    numbers = np.random.default_rng(seed).random(num_rows, dtype=np.float32)
    logits = _logits(1, seed=seed)
    row = logits[0].double().numpy()

    def column(value: float, dtype: Any = np.float32) -> npt.NDArray[Any]:
        return np.full(num_rows, value, dtype)

    ints, floats = np.zeros(0, np.int64), np.zeros(0, np.float32)
    batch = SamplingBatch(
        temperatures=column(temperature),
        top_ks=column(top_k, np.int64),
        top_ps=column(top_p),
        min_ps=column(min_p),
        uniforms=numbers,
        num_logprobs=column(-1, np.int64),
        bias_rows=ints,
        bias_ids=ints,
        bias_values=floats,
        allowed_rows=ints,
        allowed_entries=ints,
        allowed_ids=ints,
    )
    probs = _reference(row, temperature, top_k, top_p, min_p)
    cumulated = probs.cumsum()
    ids = way(name)(logits.repeat(num_rows, 1), batch, None).tolist()
    for token_id, number in zip(ids, numbers, strict=True):
        assert probs[token_id] > 0
        assert cumulated[token_id] - probs[token_id] - 1e-5 <= number <= cumulated[token_id] + 1e-5


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({}, [0.5, 0.25, 0.15, 0.1]),
        ({"temperatures": 0.5}, [0.25 / 0.345, 0.0625 / 0.345, 0.0225 / 0.345, 0.01 / 0.345]),
        ({"top_ks": 2}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_ps": 0.8}, [0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0]),
        ({"min_ps": 0.25}, [0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0]),
        ({"top_ks": 3, "top_ps": 0.8}, [2 / 3, 1 / 3, 0, 0]),  # top-p is of what top-k left: 0.75 / 0.9 > 0.8
        ({"min_ps": 0.4, "top_ps": 0.6}, [1, 0, 0, 0]),
    ],
)
def test_frequencies(make_batch: Any, sample: Sample, parameters: dict[str, float], expected: list[float]) -> None:
    num_rows = 20_000
    numbers = uniforms(np.full(num_rows, 3, np.uint64), np.arange(num_rows), np.zeros(num_rows, np.int64))
    batch = make_batch(num_rows, **({"temperatures": 1.0} | parameters), uniforms=numbers)
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.15, 0.1]])).repeat(num_rows, 1)
    counts = sample(logits, batch, None).token_ids.bincount(minlength=4)
    assert (counts / num_rows).tolist() == pytest.approx(expected, abs=0.015)
    assert [count > 0 for count in counts] == [share > 0 for share in expected]


def test_greedy_takes_the_lowest_of_equal_ids(make_batch: Any, sample: Sample) -> None:
    logits = _logits(3)
    logits[:, [700, 20, 999]] = 50.0
    assert sample(logits, make_batch(3), None).token_ids.tolist() == [20, 20, 20]


def _mixed_batch(make_batch: Any, num_rows: int) -> SamplingBatch:
    generator = np.random.default_rng(1)

    def pick(*values: float) -> Any:
        return generator.choice(values, num_rows)

    entries = np.arange(num_rows // 2)
    ids = generator.integers(VOCAB_SIZE, size=(4, num_rows // 2))
    batch: SamplingBatch = make_batch(
        num_rows,
        temperatures=pick(0.0, 0.3, 1.0, 1.7),
        top_ks=pick(0, 0, 1, 7, 400).astype(np.int64),
        top_ps=pick(1.0, 1.0, 0.4, 0.99),
        min_ps=pick(0.0, 0.0, 0.02),
        uniforms=generator.random(num_rows, dtype=np.float32),
        num_logprobs=pick(-1, 0, 3, 20).astype(np.int64),
        bias_rows=(entries * 2).tolist(),
        bias_ids=ids[0].tolist(),
        bias_values=generator.normal(size=len(entries)).tolist(),
        allowed_rows=[2, 5],
        allowed_entries=[0, 0, 1, 1, 1],
        allowed_ids=[3, 900, 1, 2, 1002],
        penalties=PenaltyBatch(
            rows=entries * 2 + 1,
            presence=generator.random(len(entries), dtype=np.float32),
            frequency=generator.random(len(entries), dtype=np.float32),
            repetition=generator.random(len(entries), dtype=np.float32) + 0.5,
            starts=np.arange(len(entries) + 1) * 2,
            ids=ids[1:3].T.ravel(),
            counts=np.tile([0, 1], len(entries)),
            placeholders=Placeholders(entries, entries),
        ),
        conditional_bans=ConditionalBans(entries, ids[3], entries, entries),
    )
    return batch


def _row_of(batch: SamplingBatch, row: int) -> SamplingBatch:
    """The batch in which this row is alone; rows of the previous step keep their numbers."""
    of_row = {
        field.name: getattr(batch, field.name)[row : row + 1]
        for field in dataclasses.fields(batch)
        if field.name in {"temperatures", "top_ks", "top_ps", "min_ps", "uniforms", "num_logprobs"}
    }
    biased = batch.bias_rows == row
    of_row |= {"bias_rows": batch.bias_rows[biased] * 0, "bias_ids": batch.bias_ids[biased]}
    allowed = batch.allowed_rows[batch.allowed_entries] == row
    of_row |= {"allowed_rows": batch.allowed_rows[batch.allowed_rows == row] * 0}
    of_row |= {"allowed_entries": batch.allowed_entries[allowed] * 0, "allowed_ids": batch.allowed_ids[allowed]}
    penalties, bans = batch.penalties, batch.conditional_bans
    assert penalties is not None
    assert bans is not None
    entry = penalties.rows == row
    listed = np.repeat(entry, 2)
    banned = bans.rows == row
    zero = penalties.rows[entry] * 0
    return dataclasses.replace(
        batch,
        **of_row,
        bias_values=batch.bias_values[biased],
        penalties=PenaltyBatch(
            rows=zero,
            presence=penalties.presence[entry],
            frequency=penalties.frequency[entry],
            repetition=penalties.repetition[entry],
            starts=np.array([0, 2])[: len(zero) + 1],
            ids=penalties.ids[listed],
            counts=penalties.counts[listed],
            placeholders=Placeholders(zero, penalties.placeholders.rows[entry]),
        ),
        conditional_bans=ConditionalBans(
            bans.rows[banned] * 0, bans.ids[banned], bans.source_rows[banned], bans.required_ids[banned]
        ),
    )


def test_a_row_is_sampled_as_if_it_were_alone(make_batch: Any, sample: Sample) -> None:
    num_rows = 64
    batch, logits = _mixed_batch(make_batch, num_rows), _logits(num_rows)
    previous = torch.arange(num_rows)
    result = sample(logits.clone(), batch, previous)
    assert result.logprobs is not None
    reported = dict(zip(result.logprobs.rows.tolist(), token_logprobs(result.logprobs), strict=True))
    assert list(reported) == np.flatnonzero(batch.num_logprobs >= 0).tolist()
    for row in range(num_rows):
        alone = sample(logits[row : row + 1].clone(), _row_of(batch, row), previous)
        assert alone.token_ids.tolist() == [int(result.token_ids[row])]
        if alone.logprobs is None:
            assert row not in reported
        else:
            assert token_logprobs(alone.logprobs) == [reported[row]]  # equal to the last bit


@pytest.mark.parametrize("vocab_size", [32003, 151936])
def test_large_rows_are_alone_too(make_batch: Any, sample: Sample, vocab_size: int) -> None:
    """Reductions over long rows are split among threads; the split must not show."""
    logits = _logits(16, vocab_size)
    fields: dict[str, Any] = {
        "temperatures": np.tile([0.7, 1.0], 8),
        "top_ps": np.repeat([1.0, 0.9], 8),
        "top_ks": np.tile([0, 0, 20, 5000], 4),
        "uniforms": np.random.default_rng(2).random(16, dtype=np.float32),
        "num_logprobs": 5,
    }
    together = sample(logits.clone(), make_batch(16, **fields), None)
    assert together.logprobs is not None
    entries = token_logprobs(together.logprobs)
    for row in range(16):
        own = {name: value if name == "num_logprobs" else value[row : row + 1] for name, value in fields.items()}
        alone = sample(logits[row : row + 1].clone(), make_batch(1, **own), None)
        assert alone.token_ids.tolist() == [int(together.token_ids[row])]
        assert alone.logprobs is not None
        assert token_logprobs(alone.logprobs) == [entries[row]]


def test_logprobs_are_of_the_model_s_own_distribution(make_batch: Any, sample: Sample) -> None:
    logits = _logits(2)
    expected = torch.log_softmax(logits, -1)
    batch = make_batch(
        2,
        temperatures=0.1,
        top_ks=1,
        num_logprobs=[-1, 2],
        bias_rows=[1, 1],
        bias_ids=[7, int(expected[1].argmax())],
        bias_values=[100.0, -INF],
    )
    result = sample(logits, batch, None)
    assert result.logprobs is not None
    assert result.logprobs.rows.tolist() == [1]
    (entry,) = token_logprobs(result.logprobs)
    assert int(result.token_ids[1]) == 7
    assert entry.logprob == float(expected[1, 7])
    best = expected[1].topk(2)
    assert (entry.top_token_ids, entry.top_logprobs) == (best.indices.tolist(), best.values.tolist())


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 0.5, 2.0])
@pytest.mark.parametrize("uniform", [0.0, 1 - 2.0**-24])
@pytest.mark.parametrize("filters", [{}, {"top_ks": 3}, {"top_ps": 0.9}, {"min_ps": 0.1}, {"top_ks": 400}])
def test_the_only_id_that_is_not_banned(
    make_batch: Any, sample: Sample, temperature: float, uniform: float, filters: dict[str, float]
) -> None:
    logits = torch.full((1, VOCAB_SIZE), -INF)
    logits[0, 641] = -5.0
    batch = make_batch(1, temperatures=temperature, uniforms=uniform, **filters)
    assert sample(logits, batch, None).token_ids.tolist() == [641]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("filters", [{}, {"top_ks": 3}, {"top_ps": 0.9}, {"min_ps": 0.1}])
def test_a_row_with_everything_banned_yields_the_lowest_id(
    make_batch: Any, sample: Sample, temperature: float, filters: dict[str, float]
) -> None:
    batch = make_batch(1, temperatures=temperature, uniforms=0.9, **filters)
    assert sample(torch.full((1, VOCAB_SIZE), -INF), batch, None).token_ids.tolist() == [0]


def test_only_allowed_ids_are_sampled(make_batch: Any, sample: Sample) -> None:
    allowed = [5, 130, 1002]
    batch = make_batch(
        300,
        temperatures=2.0,
        uniforms=np.random.default_rng(0).random(300, dtype=np.float32),
        allowed_rows=list(range(300)),
        allowed_entries=np.repeat(np.arange(300), 3).tolist(),
        allowed_ids=allowed * 300,
    )
    assert set(sample(_logits(1).repeat(300, 1), batch, None).token_ids.tolist()) == set(allowed)


def test_extreme_logits_and_temperatures_are_finite_work(make_batch: Any, sample: Sample) -> None:
    logits = torch.tensor([[3e38, -3e38, 1.0], [1e-30, 0.0, -1e-30]]).repeat_interleave(2, 0)
    batch = make_batch(4, temperatures=np.array([1e-40, 2.0, 1e-40, 2.0]), uniforms=0.99, top_ps=0.99)
    assert sample(logits, batch, None).token_ids.tolist() == [0, 0, 0, 2]


def test_nothing_waits_for_the_device(make_batch: Any) -> None:
    """A meta tensor holds no values, so any read of one by the host fails."""
    batch = _mixed_batch(make_batch, 64)
    result = sampler.sample(_logits(64).to("meta"), batch, torch.arange(64, device="meta"), kernels=TORCH_SAMPLING)
    assert result.token_ids.shape == (64,)
    assert result.logprobs is not None
    assert result.logprobs.top_ids.shape == (int((batch.num_logprobs >= 0).sum()), 20)


def test_a_nan_row_leaves_the_others_alone(make_batch: Any, sample: Sample) -> None:
    batch = make_batch(3, temperatures=1.0, top_ps=0.9, top_ks=20, uniforms=0.4)
    clean = sample(_logits(3), batch, None).token_ids.tolist()
    logits = _logits(3)
    logits[1] = float("nan")
    ids = sample(logits, batch, None).token_ids.tolist()
    assert [ids[0], ids[2]] == [clean[0], clean[2]]
    assert 0 <= ids[1] < VOCAB_SIZE


@pytest.mark.parametrize("vocab_size", [1, 16, 31, 128, 1003, 32003])
def test_masks_leave_what_torch_leaves(make_batch: Any, sample: Sample, vocab_size: int) -> None:
    num_rows, rng = 24, np.random.default_rng(vocab_size)
    rows = np.flatnonzero(np.arange(num_rows) % 4)
    bits = np.packbits(rng.random((len(rows), -(-vocab_size // 32) * 32)) < 0.3, axis=1, bitorder="little")
    bits[:, 0] |= 1  # at least one id is allowed
    masks = RowMasks(rows, bits.view(np.int32))
    batch = make_batch(
        num_rows,
        temperatures=rng.choice([0.0, 0.7, 1.5], num_rows),
        top_ps=rng.choice([1.0, 0.8], num_rows),
        top_ks=rng.choice([0, 4, 600], num_rows),
        uniforms=rng.random(num_rows, dtype=np.float32),
    )
    logits = _logits(num_rows, vocab_size)
    ids = sample(logits.clone(), batch, None, masks).token_ids
    assert torch.equal(ids, sampler.sample(logits.clone(), batch, None, masks, kernels=TORCH_SAMPLING).token_ids)
    allowed = np.unpackbits(bits, axis=1, bitorder="little")
    assert all(allowed[i, ids[row]] for i, row in enumerate(rows))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_masked_row_with_everything_banned_yields_no_token(
    make_batch: Any, sample: Sample, temperature: float
) -> None:
    """The mask leaves one id, and a bias bans that."""
    bits = np.full((2, VOCAB_SIZE // 32 + 1), 0, np.int32)
    bits[:, 3] = 1
    batch = make_batch(3, temperatures=temperature, bias_rows=[2], bias_ids=[96], bias_values=[-INF])
    masks = RowMasks(np.array([1, 2]), bits)
    ids = sample(_logits(3), batch, None, masks).token_ids.tolist()
    assert 0 <= ids[0] < VOCAB_SIZE
    assert ids[1:] == [96, NO_TOKEN_ID]


@pytest.mark.parametrize("vocab_size", [1, 2, 128, 1000, 32003])
def test_draw_inverts_the_cumulated_weights(vocab_size: int) -> None:
    generator = np.random.default_rng(vocab_size)
    weights = torch.softmax(_logits(200, vocab_size), -1)
    uniforms = generator.random(200, dtype=np.float32)
    ids = draw(weights, torch.from_numpy(uniforms)[:, None]).numpy()
    cumulated = weights.numpy().cumsum(-1, dtype=np.float64)
    for row, (token_id, uniform) in enumerate(zip(ids, uniforms, strict=True)):
        below = cumulated[row, token_id - 1] if token_id else 0.0
        assert below - 1e-6 <= uniform * cumulated[row, -1] <= cumulated[row, token_id] + 1e-6


@pytest.mark.parametrize("uniform", [0.0, 2.0**-24, 0.5, 1 - 2.0**-24])
@pytest.mark.parametrize("vocab_size", [3, 128, 300, 5000])
def test_an_id_without_weight_is_never_drawn(uniform: float, vocab_size: int) -> None:
    generator = np.random.default_rng(0)
    weights = generator.random((300, vocab_size), dtype=np.float32) ** 20  # spans the whole range of float32
    weights[generator.random(weights.shape) < 0.8] = 0
    weights[np.arange(300), generator.integers(vocab_size, size=300)] = 1
    ids = draw(torch.from_numpy(weights), torch.full((300, 1), uniform)).numpy()
    assert (weights[np.arange(300), ids] > 0).all()


def test_the_ends_of_the_unit_interval_reach_the_first_and_last_id() -> None:
    weights = torch.full((2, 1000), 1.0)
    weights[:, :3] = 0
    weights[:, -5:] = 0
    assert draw(weights, torch.tensor([[0.0], [1 - 2.0**-24]])).tolist() == [3, 994]


def test_what_is_drawn_from_a_nan_row_is_in_range() -> None:
    assert 0 <= int(draw(torch.full((1, 130), float("nan")), torch.tensor([[0.5]]))) < 130
