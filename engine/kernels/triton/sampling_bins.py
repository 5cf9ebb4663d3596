"""A histogram of a row's weights in device memory, which tells where its floors must be.

A row has two histograms of BINS int64, of ids and of mass, to which all its programs add. Sums of integers do not
depend on the order. Bin 0 holds the weight 1 alone. From there on, 64 bins divide each doubling of the distance to 1,
counted in units in the last place. So bins are as fine as the logits are flat. Equal weights share a bin, and lower
ones have higher bins.
"""

import triton
import triton.language as tl

from weft.engine.kernels.triton.sampling_rows import load_values, weigh

BINS = tl.constexpr(2048)
_UNITS = tl.constexpr(2.0**40)  # in a mass of 1
_TILE = tl.constexpr(1024)
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
    for start in range(0, count, _TILE):
        places = start + tl.arange(0, _TILE)
        weights = weigh(load_values(values + places, places < count), best, inverse)
        at = bins + to_bins(weights)
        if top_k > 0:
            tl.atomic_add(at, tl.full((_TILE,), 1, tl.int64), mask=places < count, sem="relaxed")
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
