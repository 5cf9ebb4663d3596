"""Triton functions on one row of logits, which sampling is made of: penalties, weights, floors, histogram and draw.

A weight is exp((logit - best) * inverse), where best is the row's largest logit and inverse is 1 / temperature. So the
largest weight is 1, and weights are ordered as their bits are. The parts of a row are lists of logits in the order of
the vocabulary, `stride` apart; `counts` holds the number of logits in each. Sums are float32 within one list or one
tile of lists, and float64 beyond.
"""

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from weft.engine.batch import PenaltyBatch
from weft.engine.device import to_device

LEAST = tl.constexpr(2.0**-126)  # a weight below it counts as 0
_LOWEST = tl.constexpr(-3.4028234663852886e38)  # below it there is only -infinity, the logit of banned ids
_LAST_FRACTION = tl.constexpr(1.0 - 2.0**-24)
_DIGITS = tl.constexpr(16)  # floors tried in one pass over the logits: a pass finds one hexadecimal digit of the floor


@triton.jit
def load_values(at, mask):
    """Absent values, and NaN, become -infinity."""
    values = tl.load(at, mask=mask, other=float("-inf"))
    return tl.where(values == values, values, float("-inf"))


@triton.jit
def weigh(values, best, inverse):
    """If everything is banned, all weights are 0."""
    return tl.exp((values - tl.maximum(best, _LOWEST)) * inverse)


@triton.jit
def _load_weights(lists, stride, counts, start, best, inverse, floor, NUM_LISTS: tl.constexpr, WIDTH: tl.constexpr):
    """WIDTH weights of each list from start on, (NUM_LISTS, WIDTH). Those below the floor are 0."""
    places = start + tl.arange(0, WIDTH)[None, :]
    values = load_values(lists + tl.arange(0, NUM_LISTS)[:, None] * stride + places, places < counts[:, None])
    weights = weigh(values, best, inverse)
    return tl.where(weights >= floor, weights, 0.0)


@triton.jit
def find_floor(
    lists,
    stride,
    counts,
    target,
    best,
    inverse,
    floor,
    BY_MASS: tl.constexpr,
    NUM_LISTS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The highest floor that `target` weights reach, or, BY_MASS, that weights of total mass `target` reach.

    Weights below `floor` > 0 do not count. The largest one always reaches the result. If all together miss the target,
    the result is 0. See `weight_floors` of `weft.engine.kernels.torch.layer_kernels`.
    """
    longest = tl.max(counts)
    low, high = tl.full((), 0x7FFFFFFF, tl.int64), tl.zeros((), tl.int64)  # bits of the least and the largest weight
    total = tl.zeros((), tl.float64)
    start = 0
    while start < longest:
        weights = _load_weights(lists, stride, counts, start, best, inverse, floor, NUM_LISTS, WIDTH)
        bits = weights.to(tl.int32, bitcast=True)
        low = tl.minimum(low, tl.min(tl.where(bits > 0, bits, 0x7FFFFFFF)))
        high = tl.maximum(high, tl.max(bits))
        total += tl.sum(weights if BY_MASS else (bits > 0).to(tl.float32)).to(tl.float64)
        start += WIDTH
    step = tl.full((), 1, tl.int64)
    while step * _DIGITS <= high - low:
        step *= _DIGITS
    if low >= high:  # all weights are the same
        step = step * 0
    while step > 0:
        tried = tl.minimum(low + tl.arange(0, _DIGITS) * step, high + 1).to(tl.int32)
        reached = tl.zeros((_DIGITS,), tl.float64)
        start = 0
        while start < longest:
            weights = _load_weights(lists, stride, counts, start, best, inverse, floor, NUM_LISTS, WIDTH)
            weights = tl.reshape(weights, (NUM_LISTS * WIDTH, 1))
            is_above = weights.to(tl.int32, bitcast=True) >= tried[None, :]
            reached += tl.sum(tl.where(is_above, weights if BY_MASS else 1.0, 0.0), axis=0).to(tl.float64)
            start += WIDTH
        num_reached = tl.sum((reached >= target).to(tl.int32))
        low = tl.minimum(low + (tl.maximum(num_reached, 1) - 1) * step, high)
        step = step // _DIGITS
    found = tl.minimum(low, high).to(tl.int32).to(tl.float32, bitcast=True)
    return tl.where(total >= target, found, 0.0)


@triton.jit
def weigh_lists(lists, stride, counts, best, inverse, floor, NUM_LISTS: tl.constexpr, WIDTH: tl.constexpr):
    """The mass of the weights that reach the floor, for each list: (NUM_LISTS,) float64."""
    masses = tl.zeros((NUM_LISTS,), tl.float64)
    longest = tl.max(counts)
    start = 0
    while start < longest:
        weights = _load_weights(lists, stride, counts, start, best, inverse, floor, NUM_LISTS, WIDTH)
        masses += tl.sum(weights, axis=1).to(tl.float64)
        start += WIDTH
    return masses


@triton.jit
def draw_part(masses, uniform, NUM_PARTS: tl.constexpr):
    """The first part whose cumulative mass exceeds uniform * total, and the share of its mass below that point."""
    parts = tl.arange(0, NUM_PARTS)
    cumulated = tl.cumsum(masses, axis=0)
    target = uniform.to(tl.float64) * tl.max(cumulated)
    part = tl.min(tl.where((cumulated > target) & (masses > 0), parts, NUM_PARTS - 1))
    mass = tl.sum(tl.where(parts == part, masses, 0.0))
    before = tl.sum(tl.where(parts == part, cumulated, 0.0)) - mass
    return part, tl.minimum((target - before) / mass, _LAST_FRACTION).to(tl.float32)


@triton.jit
def draw_id(logits, vocab_size, part, fraction, best, inverse, floor, PART: tl.constexpr):
    """The first id of a part whose cumulative weight exceeds `fraction` of the part's mass that reaches the floor."""
    places = tl.arange(0, PART)
    ids = part * PART + places
    values = load_values(logits + ids, ids < vocab_size)
    weights = weigh(values, best, inverse)
    weights = tl.where(weights >= floor, weights, 0.0)
    cumulated = tl.cumsum(weights, axis=0)
    is_above = (cumulated > fraction * tl.max(cumulated)) & (weights > 0)
    # Rounded sums are not quite monotonic. If none is above, the last id with a weight is drawn.
    place = tl.minimum(tl.min(tl.where(is_above, places, PART)), tl.max(tl.where(weights > 0, places, 0)))
    return (part * PART + place).to(tl.int64)


# Histograms of a row's weights in device memory tell where its floors must be. A row has two of BINS int64, of ids and
# of mass, to which all its programs add. Sums of integers do not depend on the order. Bin 0 holds the weight 1 alone.
# From there on, 64 bins divide each doubling of the distance to 1, counted in units in the last place. So bins are as
# fine as the logits are flat. Equal weights share a bin, and lower ones have higher bins.
BINS = tl.constexpr(2048)
_UNITS = tl.constexpr(2.0**40)  # in a mass of 1
_BIN_TILE = tl.constexpr(1024)
_ONE = tl.constexpr(0x3F800000)  # the bits of 1.0
_BELOW_FIRST = tl.constexpr((0x3F800000 >> 17) - 1)


@triton.jit
def to_bins(weights):
    """The bins of weights from 0 to 1."""
    distances = tl.maximum(_ONE - weights.to(tl.int32, bitcast=True), 0).to(tl.float32)
    return tl.maximum((distances.to(tl.int32, bitcast=True) >> 17) - _BELOW_FIRST, 0)


@triton.jit
def add_to_bins(bins, values, count, best, inverse, top_k, top_p):
    """Add a list of logits to the bins of its row, as far as its filters ask for them."""
    for start in range(0, count, _BIN_TILE):
        places = start + tl.arange(0, _BIN_TILE)
        weights = weigh(load_values(values + places, places < count), best, inverse)
        at = bins + to_bins(weights)
        if top_k > 0:
            tl.atomic_add(at, tl.full((_BIN_TILE,), 1, tl.int64), mask=places < count, sem="relaxed")
        if top_p < 1:
            masses = (weights * _UNITS).to(tl.int64)
            tl.atomic_add(at + BINS, masses, mask=places < count, sem="relaxed")


@triton.jit
def _first_reaching(amounts, target):
    """The first bin at which the amounts add up to the target, or else to all there is."""
    reached = tl.cumsum(amounts, axis=0)
    return tl.min(tl.where(reached >= tl.minimum(target, tl.max(reached)), tl.arange(0, BINS), BINS))


@triton.jit
def find_bins(bins, top_k, top_p, total, is_total_known):
    """Where the floors of a row are.

    Returns:
        The bin of the floor of top-k, BINS for no top-k. The first and the last bin where the floor of top-p may be;
        those of top-k if there is no top-p. The number and the mass of the ids that reach the floor of top-k for sure,
        but are in none of these bins.
    """
    places = tl.arange(0, BINS)
    counts = tl.load(bins + places).to(tl.float64)
    masses = tl.load(bins + BINS + places).to(tl.float64) / _UNITS
    kth = tl.where(top_k > 0, _first_reaching(counts, top_k.to(tl.float64)), BINS)
    least = tl.where(is_total_known, total, tl.sum(tl.where(places < kth, masses, 0.0)))
    most = tl.where(is_total_known, total, tl.sum(tl.where(places <= kth, masses, 0.0)))
    first = tl.where(top_p < 1, _first_reaching(masses, least * top_p), kth)
    last = tl.where(top_p < 1, _first_reaching(masses, most * top_p), kth)
    is_apart = (places < kth) & ((places < first) | (places > last))
    return kth, first, last, tl.sum(tl.where(is_apart, counts, 0.0)), tl.sum(tl.where(is_apart, masses, 0.0))


_PENALTY_TILE = 2048  # ids that a program edits at a time
_ROW = tl.constexpr(0)
_START = tl.constexpr(1)
_END = tl.constexpr(2)
_SOURCE = tl.constexpr(3)  # row of the previous step that sampled the placeholder, -1 for none
_REPETITION = tl.constexpr(4)
_PRESENCE = tl.constexpr(5)
_FREQUENCY = tl.constexpr(6)
_NUM_COLUMNS = tl.constexpr(7)


def apply_penalties(logits: torch.Tensor, penalties: PenaltyBatch, previous_token_ids: torch.Tensor | None) -> None:
    """Apply all penalties with one copy to the device and one launch; see `ApplyPenalties`.

    It computes what `apply_penalties` of `weft.engine.sampling.edits` computes, with the same rounding of
    each operation, so that the two agree to the last bit. Nothing waits for the device.
    """
    if len(penalties.placeholders.targets):
        assert previous_token_ids is not None, "placeholders need the ids of the previous step"
    else:
        previous_token_ids = logits.new_empty(1, dtype=torch.int64)  # not read
    packed = to_device(pack(penalties), logits.device)
    grid, sizes = (len(penalties.rows),), (logits.size(1), len(penalties.ids))
    # No fused multiply-adds: they round once where torch rounds twice.
    penalise[grid](logits, packed, previous_token_ids, *sizes, _PENALTY_TILE, num_warps=8, enable_fp_fusion=False)


def pack(penalties: PenaltyBatch) -> npt.NDArray[np.int32]:
    """The packed input of `penalise`, int32; ids and counts are far below 2**31.

    First columns (_NUM_COLUMNS, num_penalised) in the order of their numbers above, where penalties are the bits of a
    float32; then all ids, then all counts.
    """
    sources = np.full(len(penalties.rows), -1)
    sources[penalties.placeholders.targets] = penalties.placeholders.rows
    factors = (f.view(np.int32) for f in (penalties.repetition, penalties.presence, penalties.frequency))
    columns = (penalties.rows, penalties.starts[:-1], penalties.starts[1:], sources, *factors)
    return np.concatenate((*columns, penalties.ids, penalties.counts), dtype=np.int32, casting="same_kind")


@triton.jit
def _column(packed, index: tl.constexpr):
    return tl.load(packed + index * tl.num_programs(0) + tl.program_id(0))


@triton.jit
def _penalised(logits, counts, repetition, presence, frequency):
    logits = tl.where(logits > 0, tl.div_rn(logits, repetition), logits * repetition)
    return logits - presence * (counts > 0).to(tl.float32) - frequency * counts.to(tl.float32)


@triton.jit(do_not_specialize=["num_ids"])  # or it would be compiled again for multiples of 16
def penalise(logits, packed, previous_token_ids, vocab_size, num_ids, TILE: tl.constexpr):
    """Grid (num_penalised,): a program edits all ids of an entry, and no other program touches its row.

    The tiles skip the placeholder's id, which is edited last, when its count is known.
    """
    ids_at = packed + _NUM_COLUMNS * tl.num_programs(0)
    repetition = _column(packed, _REPETITION).to(tl.float32, bitcast=True)
    presence = _column(packed, _PRESENCE).to(tl.float32, bitcast=True)
    frequency = _column(packed, _FREQUENCY).to(tl.float32, bitcast=True)
    source = _column(packed, _SOURCE)
    sampled_id = tl.load(previous_token_ids + source, mask=source >= 0, other=-1)
    row = logits + _column(packed, _ROW).to(tl.int64) * vocab_size
    start, end = _column(packed, _START), _column(packed, _END)
    known_counts = tl.zeros((TILE,), tl.int32)
    while start < end:
        places = start + tl.arange(0, TILE)
        ids = tl.load(ids_at + places, mask=places < end, other=-1)
        counts = tl.load(ids_at + num_ids + places, mask=places < end, other=0)
        known_counts += tl.where(ids == sampled_id, counts, 0)
        is_edited = (places < end) & (ids != sampled_id)
        values = tl.load(row + ids, mask=is_edited, other=0.0)
        tl.store(row + ids, _penalised(values, counts, repetition, presence, frequency), mask=is_edited)
        start += TILE
    if sampled_id >= 0:
        value, count = tl.load(row + sampled_id), tl.sum(known_counts) + 1
        tl.store(row + sampled_id, _penalised(value, count, repetition, presence, frequency))
