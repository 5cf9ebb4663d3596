/* The parts of attention: addresses in the cache, products in tiles, and online softmax; attention.c puts them together.
 *
 * First the addresses of a token's keys and values; attention.c describes the layout.
 */
#ifndef WEFT_ATTENTION_H
#define WEFT_ATTENTION_H

#include "attention_plan.h"
#include "pairs.h"
#include "tiles.h"
#include "vectors.h"

enum {
    UNIT = 16, /* tokens */
    STEP = 32, /* tokens that one product of weights and values covers */
    CHUNK_UNITS = CHUNK / UNIT,
    CHUNK_STEPS = CHUNK / STEP,
    MAX_STEPS = 640 / STEP, /* the most steps of a product: those of the longest head */
};

/* Bytes of the keys, or of the values, of a block and head. */
static inline int64_t side_bytes(const Plan *plan) {
    return plan->block_size * plan->head_dim * (plan->is_rounded ? (int64_t)sizeof(int8_t) : (int64_t)sizeof(bf16));
}

static inline int64_t unit_bytes(const Plan *plan) { return side_bytes(plan) / plan->block_size * UNIT; }

static inline int64_t scale_bytes(const Plan *plan) {
    return plan->is_rounded ? plan->block_size * (int64_t)sizeof(float) : 0;
}

/* Offset of the keys of a block and head in a layer's cache. */
static inline int64_t keys_offset(const Plan *plan, int64_t block, int64_t head) {
    const int64_t sides = plan->is_latent ? 1 : 2;
    return (block * plan->num_kv_heads + head) * sides * (side_bytes(plan) + scale_bytes(plan));
}

/* Offset from there to the values of the same tokens. */
static inline int64_t values_offset(const Plan *plan) { return plan->is_latent ? 0 : side_bytes(plan); }

/* Offset from there to the scales of keys; those of values follow. */
static inline int64_t scales_offset(const Plan *plan) { return 2 * side_bytes(plan); }

static inline bool is_woven(const Plan *plan) { return plan->block_size % STEP == 0; }

static inline void write_key(const Plan *plan, char *keys, int64_t index, const bf16 *key) {
    bf16 *to = (bf16 *)(keys + index / UNIT * unit_bytes(plan)) + index % UNIT * 2;
    for (int64_t pair = 0; pair < plan->head_dim / 2; pair++) memcpy(to + pair * 2 * UNIT, key + 2 * pair, 4);
}

static inline void write_value(const Plan *plan, char *values, int64_t index, const bf16 *value) {
    const int64_t tokens = is_woven(plan) ? STEP : UNIT;
    bf16 *to = (bf16 *)(values + index / tokens * (tokens / UNIT) * unit_bytes(plan)) + index % tokens / 2 * 2 * LANES;
    const uint32_t shift = index % 2 * 16, kept = 0xffff0000u >> shift;
    for (int64_t dim = 0; dim < plan->head_dim; dim += LANES, to += tokens * LANES)
        store_bits(to, (load_bits(to) & kept) | ((u32x16)load_bf16(value + dim) >> (16 - shift)));
}

/* Round `dim` values to int8, 16 a line, lines `stride` bytes apart. Returns the scale, NaN unless all are finite. */
static inline float round_head(const bf16 *from, int64_t dim, int8_t *to, int64_t stride) {
    f32x16 most = {0}, zeros = {0};
    for (int64_t at = 0; at < dim; at += LANES) {
        const f32x16 values = load_bf16(from + at);
        most = larger(most, (f32x16)((u32x16)values & 0x7fffffffu));
        zeros += values * 0.0f; /* a maximum would hide NaN */
    }
    const float scale = reduce_max(most) / 127 + reduce_add(zeros), factor = scale > 0 ? 1 / scale : 0;
    const f32x16 magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to a whole number */
    for (int64_t at = 0; at < dim; at += LANES, to += stride) {
        i8x16 line = __builtin_convertvector((i32x16)(load_bf16(from + at) * factor + magic), i8x16);
        memcpy(to, &line, sizeof line);
    }
    return scale;
}

/* Write a token's key and value of a head in int8, and their scales. */
static inline void write_rounded(const Plan *plan, char *keys, int64_t index, const bf16 *key, const bf16 *value) {
    int8_t line[MAX_STEPS * STEP], *to = (int8_t *)keys + index / UNIT * unit_bytes(plan);
    float scales[2] = {round_head(key, plan->head_dim, line, LANES)};
    for (int64_t dim = 0; dim < plan->head_dim; dim++) to[dim * UNIT + index % UNIT] = line[dim];
    const int64_t tokens = is_woven(plan) ? STEP : UNIT;
    to = (int8_t *)keys + values_offset(plan) + index / tokens * (tokens / UNIT) * unit_bytes(plan);
    scales[1] = round_head(value, plan->head_dim, to + index % tokens * LANES, tokens * LANES);
    for (int side = 0; side < 2; side++)
        memcpy(keys + scales_offset(plan) + side * scale_bytes(plan) + index * (int64_t)sizeof(float), scales + side,
               sizeof(float));
}

/* The first token from `token` on that does not share a pair of the V cache with the token before it. Threads that
 * start there never write to one pair at the same time. */
static inline int64_t pair_start(const Plan *plan, int64_t token) {
    bool is_second = token > 0 && token < plan->num_tokens && plan->slots[token] % 2 == 1;
    return is_second && plan->slots[token] == plan->slots[token - 1] + 1 ? token + 1 : token;
}

/* Products of rows and keys, and of weights and values, in tiles: 16 x 32 inputs on the left, 16 x 16 float32 results. */

enum {
    STREAMS = 8,             /* units that are prefetched at the same time */
    PARTS_AHEAD = 16,        /* parts of a prefetch, one with each pair of a step: all at once would delay loads */
    PART_BYTES = 128,
    LEFT_ROWS = 16,          /* rows of a tile on the left of a product */
    LEFT_VALUES = 16 * 32,
    RESULT_VALUES = 16 * 16, /* values of a tile of results */
    TILE_BYTES = 1024,
};

/* Units to prefetch while others are used, several at a time, because memory serves several streams faster than one. */
typedef struct {
    const char *units[2 * CHUNK_UNITS];
    int64_t num_units, unit_bytes, unit, byte;
} Ahead;

INLINE bool is_left(const Ahead *ahead) { return ahead && ahead->unit < ahead->num_units; }

/* Prefetch one of the PARTS_AHEAD parts of the next 2 KB; `is_left` must be true. */
INLINE void prefetch_part(const Ahead *ahead, int part) {
    const char *from = ahead->units[ahead->unit + part % STREAMS] + ahead->byte + part / STREAMS * PART_BYTES;
    for (int byte = 0; byte < PART_BYTES; byte += 64) __builtin_prefetch(from + byte, 0, 2);
}

/* Go on to the next 2 KB. */
INLINE void move_on(Ahead *ahead) {
    ahead->byte += PARTS_AHEAD / STREAMS * PART_BYTES;
    if (ahead->byte < ahead->unit_bytes) return;
    ahead->byte = 0;
    ahead->unit += STREAMS;
}

/* Prefetch 2 KB, if something is left. */
INLINE void prefetch_next(Ahead *ahead) {
    if (!is_left(ahead)) return;
    for (int part = 0; part < PARTS_AHEAD; part++) prefetch_part(ahead, part);
    move_on(ahead);
}

/* One or two tiles of rows on the left, at left and left + second_left, each of `steps` adjacent operands; two columns of
 * operands on the right. The results of the first tile of rows are at `to` and to + next_column, those of the second
 * second_to further. */
typedef struct {
    int64_t rows, steps;
    const Input *left;
    int64_t second_left;
    const char *right[2][MAX_STEPS]; /* tiles of bfloat16, or of int8 */
    bool is_rounded;
    float *to;
    int64_t next_column, second_to;
} Product;

#if defined(__AMX_BF16__)

enum { MOST_WIDENED_ROWS = BLOCK_ROWS }; /* with more, chunks are widened once for all rows */

enum { WIDENED = 4 }; /* tiles between stores and the loads that wait for them */

/* A tile on the right as bfloat16: where it is, or widened. */
INLINE const char *widened(const Product *product, int column, int64_t step, char *to) {
    const char *from = product->right[column][step];
    if (!product->is_rounded) return from;
    for (int pair = 0; pair < PARTS_AHEAD; pair++) store_bits(to + 64 * pair, pairs_of_lines(from + 32 * pair));
    return to;
}

INLINE void multiply_tiles(const Product *product, int row_tiles, Ahead *ahead) {
    _tile_zero(0);
    _tile_zero(1);
    if (row_tiles > 1) {
        _tile_zero(2);
        _tile_zero(3);
    }
    _Alignas(64) char tiles[WIDENED][2][TILE_BYTES];
    for (int64_t step = 0; step < product->steps; step++) {
        const bf16 *left = product->left + step * LEFT_VALUES;
        prefetch_next(ahead);
        const char *first = widened(product, 0, step, tiles[step % WIDENED][0]);
        const char *second = widened(product, 1, step, tiles[step % WIDENED][1]);
        if (product->is_rounded) __asm__ volatile("" ::: "memory");
        _tile_loadd(4, left, 64);
        _tile_stream_loadd(6, first, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_stream_loadd(7, second, 64);
        _tile_dpbf16ps(1, 4, 7);
        if (row_tiles > 1) {
            _tile_loadd(5, left + product->second_left, 64);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, product->to, 64);
    _tile_stored(1, product->to + product->next_column, 64);
    if (row_tiles > 1) {
        _tile_stored(2, product->to + product->second_to, 64);
        _tile_stored(3, product->to + product->second_to + product->next_column, 64);
    }
}

static void multiply(const Product *product, Ahead *ahead) {
    __asm__ volatile("" ::: "memory"); /* the compiler does not know that tile loads read memory */
    if (product->rows > LEFT_ROWS)
        multiply_tiles(product, 2, ahead);
    else
        multiply_tiles(product, 1, ahead);
}

#else

#if defined(__AVX512F__)
enum { ROWS_AT_ONCE = 8 }; /* a divisor of LEFT_ROWS; 8 rows x 2 columns of sums fit into 32 registers */
#else
enum { ROWS_AT_ONCE = 4 };
#endif
enum { MOST_WIDENED_ROWS = ROWS_AT_ONCE };

/* Up to ROWS_AT_ONCE rows times COLUMNS_AT_ONCE columns from `column` on. */
INLINE void multiply_rows(const Product *product, const Input *left, int rows, int column, float *to, Ahead *ahead,
                          bool is_rounded) {
    Sums sums[ROWS_AT_ONCE][COLUMNS_AT_ONCE][PARTS] = {0};
    for (int64_t step = 0; step < product->steps; step++, left += LEFT_VALUES) {
        const bool asks = is_left(ahead);
        for (int pair = 0; pair < PARTS_AHEAD; pair++) {
            if (asks) prefetch_part(ahead, pair);
            Pair lines[COLUMNS_AT_ONCE][PARTS];
            for (int c = 0; c < COLUMNS_AT_ONCE; c++)
                for (int part = 0; part < PARTS; part++)
                    lines[c][part] = is_rounded ? load_rounded_pair(product->right[column + c][step] + 32 * pair, part)
                                                : load_pair(product->right[column + c][step] + 64 * pair, part);
            for (int row = 0; row < rows; row++)
                for (int c = 0; c < COLUMNS_AT_ONCE; c++)
                    for (int part = 0; part < PARTS; part++)
                        sums[row][c][part] =
                            add_products(sums[row][c][part], left + row * STEP + 2 * pair, lines[c][part]);
        }
        if (asks) move_on(ahead);
    }
    for (int row = 0; row < rows; row++)
        for (int c = 0; c < COLUMNS_AT_ONCE; c++)
            memcpy(to + (column + c) * product->next_column + row * LANES, sums[row][c], LANES * sizeof(float));
}

static void multiply(const Product *product, Ahead *ahead) {
    for (int64_t row = 0; row < product->rows; row += ROWS_AT_ONCE) {
        const Input *left = product->left + row / 16 * product->second_left + row % 16 * STEP;
        float *to = product->to + row / 16 * product->second_to + row % 16 * LANES;
        for (int column = 0; column < 2; column += COLUMNS_AT_ONCE) {
            switch (min_of(product->rows - row, ROWS_AT_ONCE)) {
#define CASE(ROWS)                                                         \
    case ROWS:                                                             \
        if (product->is_rounded)                                           \
            multiply_rows(product, left, ROWS, column, to, ahead, true);   \
        else                                                               \
            multiply_rows(product, left, ROWS, column, to, ahead, false);  \
        break;
                CASE(1)
                CASE(2)
                CASE(3)
                CASE(4)
#if defined(__AVX512F__)
                CASE(5)
                CASE(6)
                CASE(7)
                CASE(8)
#endif
#undef CASE
            }
            ahead = NULL;
        }
    }
}

#endif

/* Turns scores into weights, and merges the results of chunks (online softmax: Milakov and Gimelshein, 2018). */

#include <math.h>


#define LOG2_E 1.4426950408889634

enum { ODD_UNITS = CHUNK_UNITS / 2 * RESULT_VALUES }; /* offset of the scores of odd units, after those of even ones */

/* 2 to the power of values <= 0, with a relative error below 3e-6; exactly 1 for 0. */
INLINE f32x16 power_of_two(f32x16 values) {
#if defined(__AVX512DQ__)
    f32x16 rest = (f32x16)_mm512_reduce_ps((__m512)values, 9); /* values - floor(values), 0 for -infinity */
#else
    i32x16 is_tiny = values < -126.0f;
    f32x16 clamped = (f32x16)(((i32x16)values & ~is_tiny) | ((i32x16)splat(-126.0f) & is_tiny));
    const f32x16 magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to a whole number */
    f32x16 whole = (clamped - 0.5f + magic) - magic, rest = clamped - whole;
#endif
    f32x16 power = splat(0.013426688f);
    power = power * rest + 0.052242469f;
    power = power * rest + 0.24128021f;
    power = power * rest + 0.69304484f;
    power = power * rest + 1.0f;
#if defined(__AVX512DQ__)
    return (f32x16)_mm512_scalef_ps((__m512)power, (__m512)values);
#else
    i32x16 exponent = (__builtin_convertvector(whole, i32x16) + 127) << 23;
    return (f32x16)((i32x16)(power * (f32x16)exponent) & ~is_tiny);
#endif
}

/* Of a row, for one chunk or all chunks so far: the maximum m of the scaled scores, and the sum of 2^(score - m). */
typedef struct {
    float maximum, sum;
} Mass;

/* Mask positions of the chunk that a row does not see: those before `first` and from `last` on. */
static void mask_row(float *scores, int64_t first_unit, int64_t end_unit, int64_t first, int64_t last) {
    const i32x16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int64_t unit = first_unit; unit < end_unit; unit++) {
        int64_t start = unit * UNIT;
        if (start >= first && start + UNIT <= last) continue;
        i32x16 seen = (lanes >= (int32_t)(first - start)) & (lanes < (int32_t)(last - start));
        float *at = scores + unit % 2 * ODD_UNITS + unit / 2 * RESULT_VALUES;
        store_f32(at, (f32x16)(((i32x16)load_f32(at) & seen) | ((i32x16)splat(-INFINITY) & ~seen)));
    }
}

/* What else than a scale makes scores of products. `cap` 0 means no soft cap; `slope` is that of the row's query head; `bias`
 * points to the number for a key at the query's own position, NULL for none. */
typedef struct {
    float scale, cap, slope;
    const float *bias;
} Shape;

/* Turn products of a row into scores: scaled, capped, and with a slope along the positions of keys. `distance` is the
 * position of the chunk's first key minus that of the query. Padding behind the context may become anything. */
static void shape_row(float *scores, int64_t first_unit, int64_t end_unit, Shape shape, int64_t distance) {
    const f32x16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int64_t unit = first_unit; unit < end_unit; unit++) {
        float *at = scores + unit % 2 * ODD_UNITS + unit / 2 * RESULT_VALUES;
        f32x16 values = load_f32(at) * shape.scale;
        if (shape.cap != 0) /* tanh(x) = 1 - 2 / (exp(2 x) + 1) */
            values = shape.cap - 2 * shape.cap / (vector_exp(values * (2 / shape.cap)) + 1.0f);
        if (shape.bias) values += load_f32(shape.bias + distance + unit * UNIT) * (float)LOG2_E;
        store_f32(at, values + shape.slope * (lanes + (float)(distance + unit * UNIT)));
    }
}

/* Multiply products of a row by the scales of the chunk's tokens. */
static void scale_row(float *scores, int64_t first_unit, int64_t end_unit, const float *scales) {
    for (int64_t unit = first_unit; unit < end_unit; unit++) {
        float *at = scores + unit % 2 * ODD_UNITS + unit / 2 * RESULT_VALUES;
        store_f32(at, load_f32(at) * load_f32(scales + unit * UNIT));
    }
}

/* Offset of a row of a block. Each 16 rows have `tiles` tiles of `values` each. */
INLINE int64_t row_start(int64_t row, int64_t tiles, int64_t values) {
    return (row / LEFT_ROWS * tiles * LEFT_ROWS + row % LEFT_ROWS) * (values / LEFT_ROWS);
}

/* Turn the scores of a block of rows into weights, in the steps [first_step, end_step) of a chunk. The weights, but not
 * their sums, are multiplied by the scales of the chunk's tokens, if there are any.
 *
 * All maxima come first. A row's exponentials wait for its maximum, and so the CPU can work on other rows meanwhile. */
static void soften(const float *scores, Input *weights, int64_t rows, int64_t first_step, int64_t end_step, float scale,
                   const float *scales, Mass *masses) {
    for (int64_t row = 0; row < rows; row++) {
        const float *at = scores + row_start(row, CHUNK_UNITS, RESULT_VALUES);
        f32x16 highest = splat(-INFINITY);
        for (int64_t step = first_step; step < end_step; step++) {
            highest = larger(load_f32(at + step * RESULT_VALUES), highest);
            highest = larger(load_f32(at + ODD_UNITS + step * RESULT_VALUES), highest);
        }
        masses[row].maximum = reduce_max(highest) * scale;
    }
    for (int64_t row = 0; row < rows; row++) {
        const float *at = scores + row_start(row, CHUNK_UNITS, RESULT_VALUES), maximum = masses[row].maximum;
        Input *to = weights + row_start(row, CHUNK_STEPS, LEFT_VALUES);
        f32x16 sums = {0};
        for (int64_t step = first_step; step < end_step; step++) {
            f32x16 low = power_of_two(load_f32(at + step * RESULT_VALUES) * scale - maximum);
            f32x16 high = power_of_two(load_f32(at + ODD_UNITS + step * RESULT_VALUES) * scale - maximum);
            sums += low;
            sums += high;
            if (scales) {
                low *= load_f32(scales + step * STEP);
                high *= load_f32(scales + step * STEP + UNIT);
            }
            store_inputs(to + step * LEFT_VALUES, low, high);
        }
        masses[row].sum = reduce_add(sums);
    }
}

/* The sum of a row with a sink, a score that has no value, in units of log2. */
INLINE float sum_with_sink(Mass mass, float sink) {
    float lower = power_of_two(splat(-fabsf(sink - mass.maximum)))[0];
    return sink > mass.maximum ? mass.sum + 1.0f / lower : mass.sum + lower;
}

/* Add a chunk's result to a row's result of the chunks before. The part's vectors are part_stride values apart.
 * Never inlined: the compiler fuses one of the two products of a sum with the addition. Inlined, it chose differently
 * for split and unsplit rows, whose results then differed in the last bit. */
static __attribute__((noinline)) void merge(Mass *mass, float *result, Mass part, const float *values,
                                            int64_t part_stride, int64_t head_dim) {
    if (part.maximum == -INFINITY) return; /* the row does not see the chunk */
    bool is_higher = part.maximum > mass->maximum;
    float lower = power_of_two(splat(-fabsf(part.maximum - mass->maximum)))[0];
    float kept = is_higher ? lower : 1.0f, added = is_higher ? 1.0f : lower;
    mass->maximum = is_higher ? part.maximum : mass->maximum;
    mass->sum = mass->sum * kept + part.sum * added;
    for (int64_t dim = 0; dim < head_dim; dim += LANES, values += part_stride)
        store_f32(result + dim, load_f32(result + dim) * kept + load_f32(values) * added);
}

#endif
