"""Functions that the sampling kernels share: weights, floors and the draw, for one row of the vocabulary.

A weight is exp((logit - best) * inverse), where best is the row's largest logit and inverse is 1 / temperature. The
parts of a row are lists in the order of the vocabulary, `stride` apart; `counts` holds the number of values in each.
Sums are float32 within one list or one tile of lists, and float64 beyond.
"""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-3.4028234663852886e38)  # below it there is only -infinity, the logit of banned ids
_LOWEST_RANK = tl.constexpr(0x00800000)
_LAST_FRACTION = tl.constexpr(1.0 - 2.0**-24)
# Floors tried in one pass over the values: each pass finds one hexadecimal digit of the floor, in eight passes.
_DIGITS = tl.constexpr(16)


@triton.jit
def load_values(at, mask):
    """Absent values, and NaN, become -infinity."""
    values = tl.load(at, mask=mask, other=float("-inf"))
    return tl.where(values == values, values, float("-inf"))


@triton.jit
def weigh(values, best, inverse):
    """If everything is banned, all weights are 0."""
    return tl.exp((values - tl.maximum(best, LOWEST)) * inverse)


@triton.jit
def _to_rank(values):
    """Floats as uint32 in the same order; -0 becomes 0."""
    bits = (values + 0.0).to(tl.uint32, bitcast=True)
    return tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _from_rank(ranks):
    return tl.where(ranks >= 0x80000000, ranks & 0x7FFFFFFF, ranks ^ 0xFFFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _load_tile(lists, stride, counts, start, NUM_LISTS: tl.constexpr, WIDTH: tl.constexpr):
    """WIDTH values of each list from start on, (NUM_LISTS, WIDTH)."""
    places = start + tl.arange(0, WIDTH)[None, :]
    return load_values(lists + tl.arange(0, NUM_LISTS)[:, None] * stride + places, places < counts[:, None])


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
    """The highest floor that `target` logits reach, or, BY_MASS, that weights of total mass `target` reach.

    BY_MASS, logits below `floor` weigh nothing. The best logit always reaches the result; if all logits together miss
    the target, all of them do. See `weft.engine.kernels.torch.filters`.
    """
    low = tl.zeros((1,), tl.uint32)
    step = tl.full((1,), 1 << 28, tl.uint32)
    longest = tl.max(counts)
    for _ in range(8):
        ranks = low + tl.arange(0, _DIGITS).to(tl.uint32) * step
        reached = tl.zeros((_DIGITS,), tl.float64)
        start = 0
        while start < longest:
            values = tl.reshape(_load_tile(lists, stride, counts, start, NUM_LISTS, WIDTH), (NUM_LISTS * WIDTH, 1))
            if BY_MASS:
                amounts = tl.where(values >= floor, weigh(values, best, inverse), 0.0)
                is_above = _to_rank(amounts) >= ranks[None, :]
            else:
                amounts = tl.full((NUM_LISTS * WIDTH, 1), 1.0, tl.float32)
                is_above = _to_rank(values) >= ranks[None, :]
            reached += tl.sum(tl.where(is_above, amounts, 0.0), axis=0).to(tl.float64)
            start += WIDTH
        num_reached = tl.sum((reached >= target).to(tl.int32), axis=0)
        low += (tl.maximum(num_reached, 1) - 1).to(tl.uint32) * step
        step = step // _DIGITS
    highest = tl.zeros((1,), tl.float32) + (1.0 if BY_MASS else best)
    return tl.max(_from_rank(tl.minimum(tl.maximum(low, _LOWEST_RANK), _to_rank(highest))))


@triton.jit
def weigh_lists(
    lists, stride, counts, best, inverse, floor, weight_floor, NUM_LISTS: tl.constexpr, WIDTH: tl.constexpr
):
    """The mass of the values that reach both floors, for each list: (NUM_LISTS,) float64."""
    masses = tl.zeros((NUM_LISTS,), tl.float64)
    longest = tl.max(counts)
    start = 0
    while start < longest:
        values = _load_tile(lists, stride, counts, start, NUM_LISTS, WIDTH)
        weights = weigh(values, best, inverse)
        weights = tl.where((values >= floor) & (weights >= weight_floor), weights, 0.0)
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
def draw_id(logits, vocab_size, part, fraction, best, inverse, floor, weight_floor, PART: tl.constexpr):
    """The first id of a part whose cumulative weight exceeds `fraction` of the part's mass that reaches both floors."""
    places = tl.arange(0, PART)
    ids = part * PART + places
    values = load_values(logits + ids, ids < vocab_size)
    weights = weigh(values, best, inverse)
    weights = tl.where((values >= floor) & (weights >= weight_floor), weights, 0.0)
    cumulated = tl.cumsum(weights, axis=0)
    is_above = (cumulated > fraction * tl.max(cumulated)) & (weights > 0)
    # Rounded sums are not quite monotonic. If none is above, the last id with a weight is drawn.
    place = tl.minimum(tl.min(tl.where(is_above, places, PART)), tl.max(tl.where(weights > 0, places, 0)))
    return (part * PART + place).to(tl.int64)
