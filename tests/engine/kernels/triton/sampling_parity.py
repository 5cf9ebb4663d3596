"""Checks of `triton` and `triton_penalties` against torch on the CPU, on any device: Triton's interpreter or a GPU.

Imported where triton is: by the tests that run interpreted, and by those that need a GPU.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weft.engine.batch import NO_TOKEN_ID, PenaltyBatch, Placeholders, RowMasks, SamplingBatch
from weft.engine.kernels.torch.layer_kernels import pick_ids
from weft.engine.kernels.triton import sampling_rows_jit as triton_penalties
from weft.engine.kernels.triton.sampling import TritonGraphSampler, TritonSampler
from weft.engine.sampling.edits import TokenCounts, apply_penalties

INF = float("inf")
CPU = torch.device("cpu")
SMALL_VOCABULARIES = (1, 100, 5003)
LARGE_VOCABULARIES = (32003, 151936, 262144)
LAST_UNIFORM = 1 - 2.0**-24


def make_batch(num_rows: int, **columns: Any) -> SamplingBatch:
    """Greedy rows, but for what is given: one value for all rows, or one each."""
    ints, floats = np.zeros(0, np.int64), np.zeros(0, np.float32)
    defaults = {"temperatures": 0.0, "top_ks": 0, "top_ps": 1.0, "min_ps": 0.0, "uniforms": 0.0, "num_logprobs": -1}
    values = {
        name: np.array(
            np.broadcast_to(columns.get(name, value), num_rows), np.int64 if isinstance(value, int) else np.float32
        )
        for name, value in defaults.items()
    }
    return SamplingBatch(
        **values,
        bias_rows=ints,
        bias_ids=ints,
        bias_values=floats,
        allowed_rows=ints,
        allowed_entries=ints,
        allowed_ids=ints,
    )


def make_masks(rng: np.random.Generator, rows: npt.NDArray[np.int64], vocab_size: int) -> RowMasks:
    """Each allows a third of the ids, the first among them."""
    bits = np.packbits(rng.random((len(rows), -(-vocab_size // 32) * 32)) < 0.3, axis=1, bitorder="little")
    bits[:, 0] |= 1
    return RowMasks(rows, bits.view(np.int32))


def pick(device: torch.device, logits: torch.Tensor, batch: SamplingBatch, masks: RowMasks | None = None) -> list[int]:
    ids: list[int] = TritonSampler()(logits.clone().to(device), batch, masks).tolist()
    return ids


def cumulate(batch: SamplingBatch, row: int, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """What is left of the row's distribution, added up in float64."""
    weights = np.exp((logits - logits.max()) / batch.temperatures[row]).astype(np.float64)
    is_kept = weights >= batch.min_ps[row]
    if batch.top_ks[row]:
        is_kept &= weights >= np.sort(weights)[-min(batch.top_ks[row], len(weights))]
    weights *= is_kept
    falling = np.sort(weights)[::-1]
    nucleus = np.searchsorted(falling.cumsum(), batch.top_ps[row] * weights.sum())
    weights *= weights >= falling[min(nucleus, len(falling) - 1)]
    return np.asarray(weights.cumsum() / weights.sum())


def check_ids(device: torch.device, vocab_size: int, num_rows: int = 16) -> None:
    """Every kind of row, masked and not."""
    rng = np.random.default_rng(vocab_size)
    batch = make_batch(
        num_rows,
        temperatures=rng.choice([0.0, 0.3, 0.7, 1.7], num_rows),
        top_ks=rng.choice([0, 0, 1, 20, 3000], num_rows),
        top_ps=rng.choice([1.0, 1.0, 0.4, 0.95, 0.0], num_rows),
        min_ps=rng.choice([0.0, 0.0, 0.02, 1.0], num_rows),
        uniforms=rng.random(num_rows, dtype=np.float32),
    )
    logits = torch.tensor(rng.normal(size=(num_rows, vocab_size)) * 3, dtype=torch.float32)
    masks = make_masks(rng, np.flatnonzero(np.arange(num_rows) % 3), vocab_size)
    compare(device, logits, batch, masks)


def compare(device: torch.device, logits: torch.Tensor, batch: SamplingBatch, masks: RowMasks | None) -> None:
    """Ids are torch's, or all between the two is within 1e-5 of the number. Logits that are NaN are banned."""
    ids = pick(device, logits, batch, masks)
    logits = logits.nan_to_num(-INF)
    expected = pick_ids(logits.clone(), batch, masks).tolist()
    if masks is not None:
        masks.apply(logits)
    for row in np.flatnonzero(np.array(ids) != expected):
        assert batch.temperatures[row] > 0, (ids[row], expected[row])
        low, high = sorted((ids[row], expected[row]))
        between = cumulate(batch, row, logits[row].numpy())[low:high]
        assert abs(between - batch.uniforms[row]).max() < 1e-5, (row, ids[row], expected[row])


FLAT_FILTERS = np.array([  # top_k, top_p, min_p
    (0, 0.5, 0), (0, 0.9, 0), (0, 0.999, 0), (3000, 1, 0), (3000, 0.8, 0), (40, 0.9, 0), (0, 1, 0.3), (0, 0.7, 0.3),
    (5000, 0.6, 0.05),
])  # fmt: skip


def make_flat(rng: np.random.Generator, vocab_size: int) -> npt.NDArray[np.float32]:
    """(9, vocab_size): smooth, nearly uniform, with many ties, in two clusters, crowded, of one value, banned, NaN."""
    normal = rng.normal(size=vocab_size)
    rounded = torch.tensor(8 + normal, dtype=torch.bfloat16).float().numpy()
    banned, holes = normal.copy(), normal.copy()
    banned[rng.random(vocab_size) < 0.5] = -INF
    holes[rng.random(vocab_size) < 0.2] = np.nan
    clusters = np.where(rng.random(vocab_size) < 0.5, 3.0, np.float32(3.000001))
    # The floor of top-k is in a crowd of close logits, so that the mass it leaves could be 1264 to 2824.
    crowd = rng.permutation(np.concatenate((np.linspace(0, 1, 2000), np.tile((1.5, 1.5001), vocab_size // 2 - 999))))
    constant = np.full(vocab_size, -2.5)
    rows = (normal, 0.3 * normal, 0.02 * normal, rounded, clusters, -crowd[:vocab_size], constant, banned, holes)
    return np.stack(rows).astype(np.float32)


def check_flat_logits(device: torch.device, vocab_size: int = 9001) -> None:
    """Lists that hold nearly the whole vocabulary; each row meets every third filter, one row has a mask."""
    rng = np.random.default_rng(vocab_size)
    logits = torch.from_numpy(make_flat(rng, vocab_size))
    num_rows = len(logits)
    masks = make_masks(rng, np.array([2]), vocab_size)
    for first in (0, 3, 6):
        top_ks, top_ps, min_ps = np.roll(FLAT_FILTERS, first, 0).T
        filters = {"top_ks": top_ks.astype(np.int64), "top_ps": top_ps, "min_ps": min_ps}
        batch = make_batch(num_rows, temperatures=1.0, uniforms=rng.random(num_rows), **filters)
        compare(device, logits, batch, masks)


def check_ties(device: torch.device) -> None:
    """Ids that tie with the last one kept are kept, so that the draw reaches the last of them; -0 and 0 tie."""
    logits = torch.full((1, 5000), -9.0)
    logits[0, [7, 130, 4100]], logits[0, [20, 4999]], logits[0, 300] = 2.0, 0.0, -0.0
    filters: list[tuple[dict[str, float], int]] = [
        ({"top_ks": 1}, 4100),
        ({"top_ks": 4}, 4999),
        ({"top_ps": 0.1}, 4100),
        ({"top_ps": 0.99}, 4999),
        ({"min_ps": 1.0}, 4100),
        ({"top_ks": 4, "top_ps": 0.7}, 4100),
        ({"top_ps": 0.0}, 4100),
    ]
    for columns, last in filters:
        first_and_last = np.array([0.0, LAST_UNIFORM])
        batch = make_batch(2, temperatures=0.5, uniforms=first_and_last, **columns)
        assert pick(device, logits.repeat(2, 1), batch) == [7, last], columns
    assert pick(device, logits.repeat(3, 1), make_batch(3, temperatures=[0, 1, 1], uniforms=[0, 0, LAST_UNIFORM])) == [
        7,
        0,
        4999,
    ]


def check_bans(device: torch.device) -> None:
    """One id is left, or none: then the lowest, or no token where there is a mask."""
    columns = {
        "temperatures": np.array([0.0, 1.0, 1e-30, 0.5, 2.0, 1.0, 1e-40]),
        "top_ks": np.array([0, 0, 3, 0, 4000, 0, 0]),
        "top_ps": np.array([1, 1, 1, 0.9, 0.9, 1, 1]),
        "min_ps": np.array([0, 0, 0, 0, 0, 0.1, 0.5]),
        "uniforms": np.array([0, 0, LAST_UNIFORM, 0.5, LAST_UNIFORM, 0, LAST_UNIFORM]),
    }
    logits = torch.full((7, 4200), -INF)
    empty = torch.full((7, 4200), -INF)
    logits[:, 4101] = -5.0
    batch = make_batch(7, **columns)
    assert pick(device, logits, batch) == [4101] * 7
    assert pick(device, empty, batch) == [0] * 7
    bits = np.zeros((7, 132), np.int32)
    bits[:, 4101 // 32] = 1 << 4101 % 32
    masks = RowMasks(np.arange(7), bits)
    assert pick(device, torch.zeros(7, 4200), batch, masks) == [4101] * 7
    assert pick(device, empty, batch, masks) == [NO_TOKEN_ID] * 7


def check_extremes(device: torch.device) -> None:
    """Huge logits, tiny temperatures, infinity; a row of NaN gives an id and leaves the others alone."""
    logits = torch.tensor([[3e38, -3e38, 1.0], [1e-30, 0.0, -1e-30], [1.0, INF, INF], [float("nan")] * 3])
    for columns in ({}, {"top_ps": 0.99}, {"top_ks": 2}, {"min_ps": 1e-30}):
        cold = pick(device, logits, make_batch(4, temperatures=1e-40, uniforms=0.99, **columns))
        warm = pick(device, logits, make_batch(4, temperatures=2.0, uniforms=0.4, **columns))
        assert cold[:3] == [0, 0, 1]
        assert warm[:3] == [0, 1, 1]  # all three weights of the second row are 1
        assert 0 <= cold[3] < 3
        assert 0 <= warm[3] < 3


def check_rows_are_alone(device: torch.device, vocab_size: int = 4500) -> None:
    rng = np.random.default_rng(3)
    columns: dict[str, Any] = {
        "temperatures": np.array([0.0, 1.0, 0.7, 1.0]),
        "top_ks": np.array([0, 0, 20, 0]),
        "top_ps": np.array([1.0, 1.0, 0.9, 0.9]),
        "uniforms": rng.random(4, dtype=np.float32),
    }
    logits = torch.tensor(rng.normal(size=(4, vocab_size)) * 3, dtype=torch.float32)
    together = pick(device, logits, make_batch(4, **columns))
    for row in range(4):
        own = {name: values[row : row + 1] for name, values in columns.items()}
        assert pick(device, logits[row : row + 1], make_batch(1, **own)) == [together[row]]


def check_graph_sampler(device: torch.device, vocab_size: int = 4500) -> None:
    """In graphs padded rows change nothing, and all batches are sampled as if rows had filters."""
    rng = np.random.default_rng(4)
    sampler = TritonGraphSampler(vocab_size)
    logits = torch.tensor(rng.normal(size=(6, vocab_size)) * 3, dtype=torch.float32)
    for top_ps in (1.0, [1.0, 0.9, 1.0]):
        uniforms = rng.random(3, dtype=np.float32)
        batch = make_batch(3, temperatures=[0.0, 0.7, 1.0], top_ps=top_ps, uniforms=uniforms)
        assert sampler.can_sample(batch)
        parameters = torch.from_numpy(sampler.parameters(batch, 6)).to(device)
        ids = sampler.sample(logits.clone().to(device), parameters)
        assert (ids.dtype, ids.shape) == (torch.int64, (6,))
        assert ids[:3].tolist() == pick(device, logits[:3], batch)


def make_penalties(
    rng: np.random.Generator, rows: list[int], lengths: list[tuple[int, int]], vocab_size: int
) -> tuple[PenaltyBatch, npt.NDArray[np.int64]]:
    """Random penalties of prompts and outputs of these lengths, ids repeated; and what the previous step sampled.

    Of every three entries one has no placeholder, one has an id that is listed, if any is, and one has any id.
    """
    num = len(rows)
    listed: list[tuple[Any, Any]] = []
    for prompt_length, output_length in lengths:
        token_counts = TokenCounts(rng.integers(vocab_size, size=prompt_length).tolist())
        for token_id in rng.integers(max(vocab_size // 4, 1), size=output_length).tolist():
            token_counts.add(token_id)
        listed.append(token_counts.behind(()))
    targets = np.flatnonzero(np.arange(num) % 3)
    previous = rng.integers(vocab_size, size=num)
    sources = rng.permutation(num)[: len(targets)]
    for target, source in zip(targets, sources, strict=True):
        if target % 3 == 1 and listed[target][0]:
            previous[source] = rng.choice(listed[target][0])
    penalties = PenaltyBatch(
        rows=np.array(rows),
        presence=rng.choice([0, 0.7, -1.3], num).astype(np.float32),
        frequency=rng.choice([0, 0.3, -0.9], num).astype(np.float32),
        repetition=rng.choice([1, 1.1, 0.7], num).astype(np.float32),
        starts=np.cumsum([0, *(len(ids) for ids, _ in listed)]),
        ids=np.concatenate([ids for ids, _ in listed], dtype=np.int64),
        counts=np.concatenate([counts for _, counts in listed], dtype=np.int64),
        placeholders=Placeholders(targets, sources),
    )
    return penalties, previous


def check_penalties(device: torch.device, vocab_size: int = 9001) -> None:
    """Bit for bit what torch computes; -inf stays, and rows that are not penalised are not touched."""
    rng = np.random.default_rng(5)
    lengths = [(30, 20), (0, 0), (0, 50), (40, 0), (0, 0), (0, 0), (7, 1), (3000, 200), (8000, 4000)]
    for seed in range(4):
        rows = rng.permutation(12)[: len(lengths)].tolist()
        penalties, previous = make_penalties(rng, rows, lengths, vocab_size)
        values = (rng.normal(size=(12, vocab_size)) * 4).astype(np.float32)
        values[rng.random(values.shape) < 0.1] = -INF
        values[rng.random(values.shape) < 0.1] = 0.0
        expected, logits = torch.from_numpy(values), torch.from_numpy(values).to(device, copy=True)
        before = expected.clone()
        apply_penalties(expected, penalties, torch.from_numpy(previous))
        triton_penalties.apply_penalties(logits, penalties, torch.from_numpy(previous).to(device))
        assert torch.equal(logits.cpu().view(torch.int32), expected.view(torch.int32)), seed
        assert not torch.equal(expected, before)
        assert torch.equal(expected == -INF, before == -INF)
        others = sorted(set(range(12)) - set(rows))
        assert torch.equal(logits.cpu()[others], before[others])


def check_penalties_of_rows_are_alone(device: torch.device, vocab_size: int = 500) -> None:
    """An entry by itself gets what it gets beside others, without a placeholder as well as with one."""
    rng = np.random.default_rng(6)
    lengths = [(30, 20), (5, 400), (0, 9)]
    penalties, previous = make_penalties(rng, [2, 0, 1], lengths, vocab_size)
    logits = torch.from_numpy(rng.normal(size=(3, vocab_size)).astype(np.float32))
    previous_token_ids = torch.from_numpy(previous).to(device)
    together = logits.to(device, copy=True)
    triton_penalties.apply_penalties(together, penalties, previous_token_ids)
    for entry, row in enumerate(penalties.rows.tolist()):
        start, end = penalties.starts[entry : entry + 2].tolist()
        own = penalties.placeholders.targets == entry
        alone = PenaltyBatch(
            rows=np.zeros(1, np.int64),
            presence=penalties.presence[entry : entry + 1],
            frequency=penalties.frequency[entry : entry + 1],
            repetition=penalties.repetition[entry : entry + 1],
            starts=np.array([0, end - start]),
            ids=penalties.ids[start:end],
            counts=penalties.counts[start:end],
            placeholders=Placeholders(penalties.placeholders.targets[own] * 0, penalties.placeholders.rows[own]),
        )
        row_logits = logits[row : row + 1].to(device, copy=True)
        triton_penalties.apply_penalties(row_logits, alone, previous_token_ids if own.any() else None)
        assert torch.equal(row_logits[0], together[row])


CHECKS = (
    check_flat_logits,
    check_ties,
    check_bans,
    check_extremes,
    check_rows_are_alone,
    check_graph_sampler,
    check_penalties,
    check_penalties_of_rows_are_alone,
)
