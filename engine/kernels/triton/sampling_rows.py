"""Functions that the sampling kernels share: weights, floors and the draw, for one row of the vocabulary.

A weight is exp((logit - best) * inverse), where best is the row's largest logit and inverse is 1 / temperature. So the
largest weight is 1, and weights are ordered as their bits are. The parts of a row are lists of logits in the order of
the vocabulary, `stride` apart; `counts` holds the number of logits in each. Sums are float32 within one list or one
tile of lists, and float64 beyond.
"""

import triton
import triton.language as tl

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
    the result is 0. See `weft.engine.kernels.torch.filters`.
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
