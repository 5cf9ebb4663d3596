/* The layout of small integers: each group of 16 or 32 weights of an output has a scale and, in some forms, an offset.
 *
 * A weight is scale * (q - centre), or scale * q - offset, with q of 4, 6 or 8 bits and without sign. Inputs are rounded
 * to int8, with a scale for each group of a row. So the sum over a group is a whole number, exact in any order, and only
 * the sums of groups are added as float32: the bits of a row do not depend on the number of rows, threads or instructions.
 *
 * Panels have 16 outputs; in a panel follow, for every 64 inputs, the weights, the scales and the offsets. Weights lie in
 * lines of 64 bytes, for four inputs of the 16 outputs. With 4 bits, a byte has an input of the first half of a group below
 * and one of the second half above. With 6 bits, the lower four bits lie so in 8 lines, those of the first half of the 64
 * inputs below, and the upper two in 4 lines, those of the first quarter lowest. Scales and offsets are half precision, in
 * units of a factor that each output has.
 */
#ifndef WEFT_GROUPED_LAYOUT_H
#define WEFT_GROUPED_LAYOUT_H

#include "linear_job.h"

enum { STEP = 64, FORM_BITS = 0xff, FORM_GROUP = 8, FORM_OFFSET = 16 };

/* How weights are stored. As an integer: bits + (group << 8) + (has_offset << 16). */
typedef struct {
    int bits, group, has_offset;
} Form;

INLINE Form read_form(int64_t form) {
    return (Form){(int)(form & FORM_BITS), (int)group_of_form(form), (int)(form >> FORM_OFFSET)};
}

/* Bytes of the weights of STEP inputs of a panel, of their scales, and of a step in all. */
INLINE int64_t weight_bytes(Form form) { return PANEL * STEP * form.bits / 8; }
INLINE int64_t scale_bytes(Form form) { return PANEL * STEP / form.group * (int64_t)sizeof(uint16_t); }
INLINE int64_t step_bytes(Form form) { return weight_bytes(form) + scale_bytes(form) * (1 + form.has_offset); }

INLINE int64_t padded_inputs(int64_t k) { return (k + STEP - 1) / STEP * STEP; }

/* Where the byte of a weight of a panel lies, and how far its bits are shifted: with 6 bits, its lower four. */
INLINE int64_t place_of(Form form, int64_t output, int64_t input, int *shift) {
    const int64_t lines = form.bits == 8 ? 16 : form.bits == 6 ? 8 : form.group / 8; /* of one quad, or two */
    const int64_t quad = input % STEP / 4, first = form.bits == 4 ? quad / (2 * lines) * lines : 0, line = quad % lines;
    *shift = form.bits == 8 ? 0 : quad / lines % 2 * 4;
    return input / STEP * step_bytes(form) + ((first + line) * PANEL + output) * 4 + input % 4;
}

/* The same for the upper two of 6 bits. */
INLINE int64_t upper_place_of(Form form, int64_t output, int64_t input, int *shift) {
    const int64_t quad = input % STEP / 4;
    *shift = (int)(quad / 4 * 2);
    return input / STEP * step_bytes(form) + ((8 + quad % 4) * PANEL + output) * 4 + input % 4;
}

INLINE int64_t scale_place(Form form, int64_t output, int64_t input) {
    const int64_t group = input % STEP / form.group;
    return input / STEP * step_bytes(form) + weight_bytes(form) + (group * PANEL + output) * (int64_t)sizeof(uint16_t);
}
INLINE float half_to_f32(uint16_t half) {
    const uint32_t bits = (uint32_t)(half & 0x7fff) << 13;
    float value;
    memcpy(&value, &bits, sizeof value);
    value *= 0x1p112f;
    return half & 0x8000 ? -value : value;
}

/* A part of 16 numbers in half precision. */
INLINE Sums load_halves(const char *from) {
#if defined(__AVX512F__)
    return (Sums)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif defined(__F16C__)
    return (Sums)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#else
    Sums values;
    for (int i = 0; i < PART_LANES; i++) {
        uint16_t half;
        memcpy(&half, from + i * sizeof half, sizeof half);
        values[i] = half_to_f32(half);
    }
    return values;
#endif
}

/* Added to a whole number below 2^22, these are the bits of 1.5 * 2^23 plus that number: so it need not be converted,
 * and one instruction scales it exactly (its scale times 1.5 * 2^23 is exact, too). */
#if defined(__FMA__)
enum { BASE = 0x4b400000 };
#define BASE_VALUE 12582912.0f
#else
enum { BASE = 0 };
#define BASE_VALUE 0.0f
#endif

/* What stands for the weights' centres, or for their offsets, in the sum over a group. */
typedef union {
    int32_t whole;
    float real;
} Start;

/* Inputs are rounded to tiles of one row, or of TILED for products of tiles. For each group a tile has the int8 of its
 * rows, then the rows' scales, then their starts. */
#if defined(__AMX_INT8__)
enum { TILED = TILE_ROWS, LEAST_TILED = 7, LEAST_TILED_16 = 13 }; /* fewer rows are faster one by one; as measured */
#else
enum { TILED = 1, LEAST_TILED = 1, LEAST_TILED_16 = 1 };
#endif

INLINE int64_t rows_of_tile(const Job *job) {
    return job->rows < (group_of_form(job->form) == 16 ? LEAST_TILED_16 : LEAST_TILED) ? 1 : TILED;
}

INLINE int64_t padded_rows(const Job *job) {
    const int64_t tile = rows_of_tile(job);
    return (job->rows + tile - 1) / tile * tile;
}

/* Bytes of a row in a group of a tile, and in all. */
INLINE int64_t group_bytes(Form form) { return form.group + (int64_t)(sizeof(float) + sizeof(Start)); }
INLINE int64_t row_bytes(int64_t padded_k, Form form) { return padded_k / form.group * group_bytes(form); }

#endif
