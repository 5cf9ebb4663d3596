"""Triton kernels from logits to ids: masks, temperature, min-p, top-k, top-p and the draw, without a sort.

A row of the vocabulary is cut into parts of PART ids, and a part into chunks of CHUNK ids. `summarise` and `collect`
run one program per part, `decide` and `draw` one per row, `narrow` a few per row:

1. summarise: mask the logits; store the best logit of each chunk, and for each part the best logit, its id, the mass.
2. decide: ids of greedy and unfiltered rows; for a filtered row a floor that the weights of all ids it keeps reach.
3. collect: for each part, list the logits that reach the floor, and add them to the row's histogram of weights.
4. narrow: shorten long lists to the bins of the histogram where the floors of top-k and top-p must be.
5. draw: find the exact floors of top-k and top-p in the lists, then the id.

Programs end at once in `collect` and `draw` unless the row has filters, and in `narrow` unless its lists are long, as
they are when top-p meets flat logits. Such a row moves 16 bytes for each id: logits are read twice, lists are written
and read once. Then `draw` has a few thousand logits left, all of one or two bins. In other rows it is the lists that
are short: only the first reading covers the whole row, and the second one the parts that reach the floor.

A row's parameters are read on the device, and no program touches another row. Programs of one row share nothing but
sums of integers. So ids depend neither on the batch nor on the order of programs, and a CUDA graph can hold the
launches. Parameters are (6, num_rows) float32, in the order of the names below.
"""

import triton
import triton.language as tl

from weft.engine.kernels.triton.sampling_rows_jit import (
    BINS,
    LEAST,
    add_to_bins,
    draw_id,
    draw_part,
    find_bins,
    find_floor,
    load_values,
    to_bins,
    weigh,
    weigh_lists,
)

INVERSE_TEMPERATURE = tl.constexpr(0)  # 0 is greedy
MIN_P = tl.constexpr(1)  # 0 keeps all
TOP_K = tl.constexpr(2)  # 0 keeps all
TOP_P = tl.constexpr(3)  # 1 keeps all
UNIFORM = tl.constexpr(4)
MASK_ROW = tl.constexpr(5)  # the row's index among the masks, -1 for none

_INFINITY = tl.constexpr(float("inf"))
_NO_TOKEN_ID = tl.constexpr(-1)


@triton.jit
def _parameter(parameters, index: tl.constexpr):
    return tl.load(parameters + index * tl.num_programs(0) + tl.program_id(0))


@triton.jit
def _load_best(part_bests, num_parts, NUM_PARTS: tl.constexpr):
    """The bests of the row's parts, and the row's."""
    parts = tl.arange(0, NUM_PARTS)
    bests = tl.load(part_bests + tl.program_id(0) * num_parts + parts, mask=parts < num_parts, other=-_INFINITY)
    return bests, tl.max(bests)


@triton.jit
def _list(at, values, is_listed):
    """Write the values that are listed side by side; return their number."""
    is_listed = is_listed.to(tl.int32)
    places = tl.cumsum(is_listed, axis=0) - 1
    tl.store(at + places, values, mask=is_listed == 1)
    return tl.sum(is_listed)


@triton.jit
def summarise(
    logits,
    parameters,
    bits,
    chunk_bests,
    part_bests,
    part_best_ids,
    part_masses,
    vocab_size,
    num_words,
    PART: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (num_rows, num_parts). bits (n, num_words) int32: the lowest bit is the lowest id, and 1 allows it."""
    CHUNKS: tl.constexpr = PART // CHUNK
    part, place = tl.program_id(1), tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    chunks = tl.arange(0, CHUNKS)
    ids = part * PART + chunks[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    at = logits + tl.program_id(0).to(tl.int64) * vocab_size + ids
    values = load_values(at, ids < vocab_size)
    mask_row = _parameter(parameters, MASK_ROW).to(tl.int64)
    if mask_row >= 0:
        words = tl.load(bits + mask_row * num_words + ids // 32, mask=ids < vocab_size, other=0)
        values = tl.where((words >> (ids % 32)) & 1 == 1, values, -_INFINITY)
        tl.store(at, values, mask=ids < vocab_size)
    bests = tl.max(values, axis=1)
    tl.store(chunk_bests + place * CHUNKS + chunks, bests)
    best = tl.max(bests)
    tl.store(part_bests + place, best)
    tl.store(part_best_ids + place, tl.min(tl.where(values == best, ids, (part + 1) * PART)))
    inverse = _parameter(parameters, INVERSE_TEMPERATURE)
    if inverse > 0:
        tl.store(part_masses + place, tl.sum(weigh(values, best, inverse)))


@triton.jit
def decide(
    logits,
    parameters,
    chunk_bests,
    part_bests,
    part_best_ids,
    part_masses,
    token_ids,
    floors,
    totals,
    bins,
    sizes,
    vocab_size,
    num_parts,
    PART: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_PARTS: tl.constexpr,
):
    """Grid (num_rows,). The floor of an unfiltered row is infinity; totals are for rows with top-p alone."""
    row = tl.program_id(0)
    inverse, min_p = _parameter(parameters, INVERSE_TEMPERATURE), _parameter(parameters, MIN_P)
    top_k, top_p = _parameter(parameters, TOP_K), _parameter(parameters, TOP_P)
    parts = tl.arange(0, NUM_PARTS)
    bests, best = _load_best(part_bests, num_parts, NUM_PARTS)
    floor = tl.full((), _INFINITY, tl.float32)
    if (inverse > 0) & (best > -_INFINITY) & (best < _INFINITY):
        masses = tl.load(part_masses + row * num_parts + parts, mask=parts < num_parts, other=0.0).to(tl.float64)
        masses *= weigh(bests, best, inverse)
        if (top_k > 0) | (min_p > 0):
            floor = tl.maximum(min_p, LEAST)
            if (top_k > 0) & (top_k * CHUNK <= vocab_size):
                # The k-th largest weight is at least the k-th largest of the chunks' largest weights.
                CHUNKS: tl.constexpr = PART // CHUNK
                lists = chunk_bests + row * num_parts * CHUNKS
                counts = tl.where(parts < num_parts, CHUNKS, 0)
                kth = find_floor(lists, CHUNKS, counts, top_k, best, inverse, floor, False, NUM_PARTS, CHUNKS)
                floor = tl.maximum(floor, kth)
        elif top_p < 1:
            # If all ids below weighed as much as the floor, they would be half of what the nucleus may leave out.
            total = tl.sum(masses)
            floor = tl.maximum(0.5 * (1.0 - top_p) * total.to(tl.float32) / vocab_size, LEAST)
            tl.store(totals + row, total)
        else:
            part, fraction = draw_part(masses, _parameter(parameters, UNIFORM), NUM_PARTS)
            part_best = tl.load(part_bests + row * num_parts + part)
            at = logits + row.to(tl.int64) * vocab_size
            tl.store(token_ids + row, draw_id(at, vocab_size, part, fraction, part_best, inverse, 0.0, PART))
    else:
        best_part = tl.min(tl.where(bests == best, parts, NUM_PARTS))
        best_id = tl.load(part_best_ids + row * num_parts + best_part)
        if (best == -_INFINITY) & (_parameter(parameters, MASK_ROW) >= 0):
            best_id = tl.full((), _NO_TOKEN_ID, tl.int32)
        tl.store(token_ids + row, best_id.to(tl.int64))
    tl.store(floors + row, floor)
    tl.store(sizes + row, 0)
    if floor < _INFINITY:
        tl.store(bins + row * 2 * BINS + tl.arange(0, 2 * BINS), tl.zeros((2 * BINS,), tl.int64))


@triton.jit
def collect(
    logits,
    parameters,
    floors,
    part_bests,
    bins,
    sizes,
    lists,
    counts,
    sure_masses,
    vocab_size,
    num_parts,
    PART: tl.constexpr,
    NUM_PARTS: tl.constexpr,
):
    """Grid (num_rows, num_parts). Writes `counts` logits of each list, (num_rows, num_parts, PART)."""
    row, part = tl.program_id(0), tl.program_id(1)
    place = row * num_parts + part
    floor = tl.load(floors + row)
    if floor < _INFINITY:
        inverse = _parameter(parameters, INVERSE_TEMPERATURE)
        _, best = _load_best(part_bests, num_parts, NUM_PARTS)
        count = tl.zeros((), tl.int32)
        if weigh(tl.load(part_bests + place), best, inverse) >= floor:
            ids = part * PART + tl.arange(0, PART)
            values = load_values(logits + row.to(tl.int64) * vocab_size + ids, ids < vocab_size)
            at = lists + place.to(tl.int64) * PART
            count = _list(at, values, weigh(values, best, inverse) >= floor)
            tl.debug_barrier()  # the list is written
            top_k, top_p = _parameter(parameters, TOP_K), _parameter(parameters, TOP_P)
            add_to_bins(bins + row * 2 * BINS, at, count, best, inverse, top_k, top_p)
            tl.atomic_add(sizes + row, count, sem="relaxed")
        tl.store(counts + place, count)
        tl.store(sure_masses + place, 0.0)


@triton.jit
def narrow(
    parameters,
    totals,
    part_bests,
    bins,
    sizes,
    lists,
    counts,
    sure_masses,
    apart,
    num_parts,
    PART: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    SHORT: tl.constexpr,
):
    """Grid (num_rows, programs of a row). Takes from lists of more than SHORT logits all whose fate is known.

    Their mass, if they are kept, is in sure_masses (num_rows, num_parts). The number and the mass of those that reach
    the floor of top-k are in apart (num_rows, 2).
    """
    row = tl.program_id(0)
    if tl.load(sizes + row) > SHORT:
        inverse, min_p = _parameter(parameters, INVERSE_TEMPERATURE), _parameter(parameters, MIN_P)
        top_k, top_p = _parameter(parameters, TOP_K), _parameter(parameters, TOP_P)
        _, best = _load_best(part_bests, num_parts, NUM_PARTS)
        is_alone = (top_k == 0) & (min_p == 0)
        kth, first, last, num_apart, mass_apart = find_bins(
            bins + row * 2 * BINS, top_k, top_p, tl.load(totals + row), is_alone
        )
        if tl.program_id(1) == 0:
            tl.store(apart + row * 2, num_apart)
            tl.store(apart + row * 2 + 1, mass_apart)
        for part in range(tl.program_id(1), num_parts, tl.num_programs(1)):
            place = row * num_parts + part
            at, places = lists + place.to(tl.int64) * PART, tl.arange(0, PART)
            is_value = places < tl.load(counts + place)
            values = load_values(at + places, is_value)
            weights = weigh(values, best, inverse)
            bin_of = to_bins(weights)
            tl.store(sure_masses + place, tl.sum(tl.where(is_value & (bin_of < first), weights, 0.0)))
            tl.debug_barrier()  # all values are read before some are overwritten
            count = _list(at, values, is_value & ((bin_of == kth) | ((bin_of >= first) & (bin_of <= last))))
            tl.store(counts + place, count)


@triton.jit
def draw(
    logits,
    parameters,
    floors,
    totals,
    part_bests,
    sizes,
    lists,
    counts,
    sure_masses,
    apart,
    token_ids,
    vocab_size,
    num_parts,
    PART: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    SHORT: tl.constexpr,
):
    """Grid (num_rows,)."""
    row = tl.program_id(0)
    floor = tl.load(floors + row)
    if floor < _INFINITY:
        inverse, min_p = _parameter(parameters, INVERSE_TEMPERATURE), _parameter(parameters, MIN_P)
        top_k, top_p = _parameter(parameters, TOP_K), _parameter(parameters, TOP_P)
        parts = tl.arange(0, NUM_PARTS)
        _, best = _load_best(part_bests, num_parts, NUM_PARTS)
        lengths = tl.load(counts + row * num_parts + parts, mask=parts < num_parts, other=0)
        sure = tl.load(sure_masses + row * num_parts + parts, mask=parts < num_parts, other=0.0).to(tl.float64)
        is_narrowed = tl.load(sizes + row) > SHORT
        num_apart = tl.load(apart + row * 2, mask=is_narrowed, other=0.0)
        mass_apart = tl.load(apart + row * 2 + 1, mask=is_narrowed, other=0.0)
        values = lists + row.to(tl.int64) * num_parts * PART
        if top_k > 0:
            num_left = top_k - num_apart
            kth = find_floor(values, PART, lengths, num_left, best, inverse, floor, False, NUM_PARTS, WIDTH)
            floor = tl.maximum(floor, kth)
        if top_p < 1:
            total = tl.load(totals + row)
            if (top_k > 0) | (min_p > 0):
                total = mass_apart + tl.sum(weigh_lists(values, PART, lengths, best, inverse, floor, NUM_PARTS, WIDTH))
            mass = total * top_p - tl.sum(sure)
            last = find_floor(values, PART, lengths, mass, best, inverse, floor, True, NUM_PARTS, WIDTH)
            floor = tl.maximum(floor, last)
        masses = sure + weigh_lists(values, PART, lengths, best, inverse, floor, NUM_PARTS, WIDTH)
        part, fraction = draw_part(masses, _parameter(parameters, UNIFORM), NUM_PARTS)
        at = logits + row.to(tl.int64) * vocab_size
        tl.store(token_ids + row, draw_id(at, vocab_size, part, fraction, best, inverse, floor, PART))
