/* Turns scores into weights, and merges the results of chunks (online softmax: Milakov and Gimelshein, 2018). */
#ifndef WEFT_ATTENTION_SOFTMAX_H
#define WEFT_ATTENTION_SOFTMAX_H

#include <math.h>

#include "attention_product.h"

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

/* What else than a scale makes scores of products. `cap` 0 means no soft cap; `slope` is that of the row's query head. */
typedef struct {
    float scale, cap, slope;
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
