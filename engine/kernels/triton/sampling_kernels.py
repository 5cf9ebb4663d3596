"""Triton kernels from logits to ids: masks, temperature, min-p, top-k, top-p and the draw, without a sort.

A row of the vocabulary is cut into parts of PART ids, a part into chunks of CHUNK. `summarise` and `collect` run one
program a part, `decide` and `draw` one a row:

1. summarise: masks the logits; leaves the best of every chunk, and of every part the best, its id and the mass.
2. decide: the ids of greedy and of unfiltered rows; for a filtered row a logit that no id it keeps is below.
3. collect: lists, for every part, what reaches that logit.
4. draw: the exact floors of top-k and top-p among the listed, then the id.

What a row needs is read on the device and no program touches another row: ids do not depend on the batch, and a CUDA
graph can hold the launches. Parameters are (6, num_rows) float32, their order is that of the names below.
"""

import triton
import triton.language as tl

from weft.engine.kernels.triton.sampling_rows import (
    LOWEST,
    draw_id,
    draw_part,
    find_floor,
    load_values,
    weigh,
    weigh_lists,
)

INVERSE_TEMPERATURE = tl.constexpr(0)
"""0 is greedy."""
MARGIN = tl.constexpr(1)
"""How far below the best logit min-p keeps: temperature * log(min_p)."""
TOP_K = tl.constexpr(2)
"""0 keeps all."""
TOP_P = tl.constexpr(3)
"""1 keeps all."""
UNIFORM = tl.constexpr(4)
MASK_ROW = tl.constexpr(5)
"""The row's place among the masks, -1 for none."""

_INFINITY = tl.constexpr(float("inf"))
_NO_TOKEN_ID = tl.constexpr(-1)


@triton.jit
def _parameter(parameters, index: tl.constexpr):
    return tl.load(parameters + index * tl.num_programs(0) + tl.program_id(0))


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
    """Grid (num_rows, num_parts). bits (n, num_words) int32: the lowest bit is the lowest id, 1 allows."""
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
    vocab_size,
    num_parts,
    PART: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_PARTS: tl.constexpr,
):
    """Grid (num_rows,). The floor of an unfiltered row is infinity; totals are of rows that only top-p cuts."""
    row = tl.program_id(0)
    inverse, margin = _parameter(parameters, INVERSE_TEMPERATURE), _parameter(parameters, MARGIN)
    top_k, top_p = _parameter(parameters, TOP_K), _parameter(parameters, TOP_P)
    parts = tl.arange(0, NUM_PARTS)
    bests = tl.load(part_bests + row * num_parts + parts, mask=parts < num_parts, other=-_INFINITY)
    best = tl.max(bests)
    floor = tl.full((), _INFINITY, tl.float32)
    if (inverse > 0) & (best > -_INFINITY) & (best < _INFINITY):
        masses = tl.load(part_masses + row * num_parts + parts, mask=parts < num_parts, other=0.0).to(tl.float64)
        masses *= weigh(bests, best, inverse)
        if (top_k > 0) | (margin > -_INFINITY):
            floor = tl.maximum(best + margin, LOWEST)
            if (top_k > 0) & (top_k * CHUNK <= vocab_size):
                # The k-th of the largest logits is at least the k-th of the chunks' bests.
                CHUNKS: tl.constexpr = PART // CHUNK
                lists = chunk_bests + row * num_parts * CHUNKS
                counts = tl.where(parts < num_parts, CHUNKS, 0)
                kth = find_floor(lists, CHUNKS, counts, top_k, best, inverse, floor, False, NUM_PARTS, CHUNKS)
                floor = tl.maximum(floor, kth)
        elif top_p < 1:
            # If all ids below weighed as much as the floor, they would be half of what the nucleus may leave out.
            total = tl.sum(masses)
            share = 0.5 * (1.0 - top_p) * total.to(tl.float32) / vocab_size
            floor = tl.minimum(tl.maximum(best + tl.log(share) / inverse, LOWEST), best)
            tl.store(totals + row, total)
        else:
            part, fraction = draw_part(masses, _parameter(parameters, UNIFORM), NUM_PARTS)
            part_best = tl.load(part_bests + row * num_parts + part)
            at = logits + row.to(tl.int64) * vocab_size
            tl.store(token_ids + row, draw_id(at, vocab_size, part, fraction, part_best, inverse, LOWEST, 0.0, PART))
    else:
        best_part = tl.min(tl.where(bests == best, parts, NUM_PARTS))
        best_id = tl.load(part_best_ids + row * num_parts + best_part)
        if (best == -_INFINITY) & (_parameter(parameters, MASK_ROW) >= 0):
            best_id = tl.full((), _NO_TOKEN_ID, tl.int32)
        tl.store(token_ids + row, best_id.to(tl.int64))
    tl.store(floors + row, floor)


@triton.jit
def collect(logits, floors, part_bests, lists, counts, vocab_size, PART: tl.constexpr):
    """Grid (num_rows, num_parts). lists (num_rows, num_parts, PART), of which only `counts` values are written."""
    row, part = tl.program_id(0), tl.program_id(1)
    place = row * tl.num_programs(1) + part
    floor = tl.load(floors + row)
    if floor < _INFINITY:
        count = tl.zeros((), tl.int32)
        if tl.load(part_bests + place) >= floor:
            ids = part * PART + tl.arange(0, PART)
            values = load_values(logits + row.to(tl.int64) * vocab_size + ids, ids < vocab_size)
            is_listed = (values >= floor).to(tl.int32)
            places = tl.cumsum(is_listed, axis=0) - 1
            tl.store(lists + place.to(tl.int64) * PART + places, values, mask=is_listed == 1)
            count = tl.sum(is_listed)
        tl.store(counts + place, count)


@triton.jit
def draw(
    logits,
    parameters,
    floors,
    totals,
    part_bests,
    lists,
    counts,
    token_ids,
    vocab_size,
    num_parts,
    PART: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Grid (num_rows,)."""
    row = tl.program_id(0)
    floor = tl.load(floors + row)
    if floor < _INFINITY:
        inverse, margin = _parameter(parameters, INVERSE_TEMPERATURE), _parameter(parameters, MARGIN)
        top_k, top_p = _parameter(parameters, TOP_K), _parameter(parameters, TOP_P)
        parts = tl.arange(0, NUM_PARTS)
        best = tl.max(tl.load(part_bests + row * num_parts + parts, mask=parts < num_parts, other=-_INFINITY))
        lengths = tl.load(counts + row * num_parts + parts, mask=parts < num_parts, other=0)
        values = lists + row.to(tl.int64) * num_parts * PART
        if top_k > 0:
            kth = find_floor(values, PART, lengths, top_k, best, inverse, floor, False, NUM_PARTS, WIDTH)
            floor = tl.maximum(floor, kth)
        weight_floor = tl.zeros((), tl.float32)
        if top_p < 1:
            if (top_k > 0) | (margin > -_INFINITY):
                total = tl.sum(weigh_lists(values, PART, lengths, best, inverse, floor, 0.0, NUM_PARTS, WIDTH))
            else:
                total = tl.load(totals + row)
            mass = total * top_p
            weight_floor = find_floor(values, PART, lengths, mass, best, inverse, floor, True, NUM_PARTS, WIDTH)
        masses = weigh_lists(values, PART, lengths, best, inverse, floor, weight_floor, NUM_PARTS, WIDTH)
        part, fraction = draw_part(masses, _parameter(parameters, UNIFORM), NUM_PARTS)
        at = logits + row.to(tl.int64) * vocab_size
        tl.store(token_ids + row, draw_id(at, vocab_size, part, fraction, best, inverse, floor, weight_floor, PART))
