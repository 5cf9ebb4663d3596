/* Packs integers in groups, and unpacks some outputs: see grouped_layout.h. */
#include <math.h>
#include "grouped_layout.h"
#include "pool.h"
#include "vectors.h"

typedef struct {
    const uint8_t *values;           /* (n, k) */
    const uint16_t *scales, *offsets; /* (n, k / group) in half precision; offsets may be NULL */
    int64_t n, k;
    Form form;
    char *packed;
} Packing;

/* Add bits to the quad at a place of a panel. */
INLINE void add_bits(char *to, uint32_t bits, int shift) {
    uint32_t quad;
    memcpy(&quad, to, sizeof quad);
    quad |= bits << shift;
    memcpy(to, &quad, sizeof quad);
}

/* The inputs of a group, quad by quad. */
static void pack_group(const Packing *call, int64_t row, int64_t num_rows, int64_t input, char *panel) {
    const Form form = call->form;
    for (int64_t end = input + form.group; input < end; input += 4) {
        for (int64_t r = 0; r < num_rows; r++) {
            int shift;
            uint32_t quad;
            memcpy(&quad, call->values + (row + r) * call->k + input, sizeof quad);
            char *to = panel + place_of(form, r, input, &shift);
            add_bits(to, form.bits == 6 ? quad & 0x0f0f0f0f : quad, shift);
            if (form.bits != 6) continue;
            to = panel + upper_place_of(form, r, input, &shift);
            add_bits(to, quad >> 4 & 0x03030303, shift);
        }
    }
}

static void pack_panels(const void *context, int64_t first, int64_t end) {
    const Packing *call = context;
    const Form form = call->form;
    const int64_t panel_bytes = padded_inputs(call->k) / STEP * step_bytes(form), num_groups = call->k / form.group;
    for (int64_t row = first * PANEL; row < end * PANEL; row += PANEL) {
        char *panel = call->packed + row / PANEL * panel_bytes;
        const int64_t num_rows = call->n - row < PANEL ? call->n - row : PANEL;
        for (int64_t g = 0; g < num_groups; g++) {
            const int64_t input = g * form.group;
            pack_group(call, row, num_rows, input, panel);
            for (int64_t r = 0; r < num_rows; r++) {
                const int64_t from = (row + r) * num_groups + g;
                char *to = panel + scale_place(form, r, input);
                memcpy(to, call->scales + from, sizeof(uint16_t));
                if (call->offsets) memcpy(to + scale_bytes(form), call->offsets + from, sizeof(uint16_t));
            }
        }
    }
}

/* Pack integers (n, k) and their scales and offsets, k a multiple of the group, into packed, which must be zero before. */
void weft_pack_linear_grouped(const uint8_t *values, const uint16_t *scales, const uint16_t *offsets, int64_t n, int64_t k,
                              int64_t form, char *packed) {
    const Packing call = {values, scales, offsets, n, k, read_form(form), packed};
    run_loop((n + PANEL - 1) / PANEL, 1, pack_panels, &call);
}

typedef struct {
    const char *packed;
    const float *factors;
    int64_t k;
    Form form;
    const int64_t *ids;
    bf16 *to;
} Gathering;

static void gather_rows(const void *context, int64_t first, int64_t end) {
    const Gathering *call = context;
    const Form form = call->form;
    const int64_t panel_bytes = padded_inputs(call->k) / STEP * step_bytes(form);
    const float centre = form.has_offset ? 0.0f : (float)(1 << (form.bits - 1));
    for (int64_t row = first; row < end; row++) {
        const int64_t id = call->ids[row];
        const char *panel = call->packed + id / PANEL * panel_bytes;
        for (int64_t i = 0; i < call->k; i++) {
            int shift;
            uint16_t halves[2] = {0};
            const char *at = panel + scale_place(form, id % PANEL, i);
            memcpy(halves, at, sizeof(uint16_t));
            if (form.has_offset) memcpy(halves + 1, at + scale_bytes(form), sizeof(uint16_t));
            const uint8_t byte = (uint8_t)panel[place_of(form, id % PANEL, i, &shift)];
            int q = byte >> shift & (form.bits == 8 ? 255 : 15);
            if (form.bits == 6) q |= ((uint8_t)panel[upper_place_of(form, id % PANEL, i, &shift)] >> shift & 3) << 4;
            const float value = half_to_f32(halves[0]) * ((float)q - centre) - half_to_f32(halves[1]);
            call->to[row * call->k + i] = from_f32(value * call->factors[id]);
        }
    }
}

/* Unpack some outputs: rows `ids` of the packed matrix as (num_ids, k). */
void weft_gather_rows_grouped(const char *packed, const float *factors, int64_t form, int64_t k, const int64_t *ids,
                              int64_t num_ids, bf16 *to) {
    const Gathering call = {packed, factors, k, read_form(form), ids, to};
    run_loop(num_ids, 32, gather_rows, &call);
}

/* Rounds weights in groups of 32: to 8 bits with a scale, by which the largest magnitude becomes 127, or to 4 bits with a
 * scale and an offset: a weight is nearly scale * q - offset.
 *
 * With 4 bits, the range that q covers is the one of several, from the extremes of the group inward, that leaves the least sum of
 * squared errors: a group with an outlier is better off if that is clipped. Scale and offset are then those of the line
 * that fits the chosen q best (least squares).
 */

enum { GROUP = 2 * LANES, LARGEST = 15, NUM_RANGES = 10 };
static const float RANGE_STEP = 0.04f;

typedef struct {
    const bf16 *weights; /* (n, k) */
    int64_t k;
    uint8_t *values;
    float *scales, *offsets; /* offsets may be NULL */
} Rounding;

typedef struct {
    f32x16 low, high;
} Group;

INLINE f32x16 nearest(f32x16 values) { return values + splat(12582912.0f) - splat(12582912.0f); } /* 1.5 * 2^23 */

INLINE f32x16 rounded(f32x16 values) { return nearest(smaller(larger(values, splat(0.0f)), splat(LARGEST))); }

INLINE Group quantized(Group weights, float scale, float least) {
    const f32x16 inverse = splat(1.0f / scale), start = splat(least);
    return (Group){rounded((weights.low - start) * inverse), rounded((weights.high - start) * inverse)};
}

INLINE float squared_error(Group weights, Group q, float scale, float least) {
    const f32x16 low = weights.low - (q.low * splat(scale) + splat(least));
    const f32x16 high = weights.high - (q.high * splat(scale) + splat(least));
    return reduce_add(low * low + high * high);
}

INLINE void store_values(Group q, uint8_t *to) {
    for (int i = 0; i < LANES; i++) {
        to[i] = (uint8_t)q.low[i];
        to[i + LANES] = (uint8_t)q.high[i];
    }
}

static void round_to_4_bits(Group weights, uint8_t *to, float *scale, float *offset) {
    const float most = reduce_max(larger(weights.low, weights.high));
    const float least = -reduce_max(larger(-weights.low, -weights.high));
    float best_error = INFINITY, best_scale = 0.0f, best_least = least;
    Group best = {splat(0.0f), splat(0.0f)};
    for (int range = 0; range < NUM_RANGES && most > least; range++) {
        const float kept = 1.0f - RANGE_STEP * (float)range, middle = 0.5f * (most + least);
        const float first = middle + (least - middle) * kept, step = (most - least) * kept / LARGEST;
        const Group q = quantized(weights, step, first);
        const float error = squared_error(weights, q, step, first);
        if (error < best_error) {
            best_error = error;
            best_scale = step;
            best_least = first;
            best = q;
        }
    }
    const float mean_q = reduce_add(best.low + best.high) / GROUP, mean = reduce_add(weights.low + weights.high) / GROUP;
    const f32x16 low = best.low - splat(mean_q), high = best.high - splat(mean_q);
    const float spread = reduce_add(low * low + high * high);
    if (spread > 0.0f) {
        best_scale = reduce_add(low * (weights.low - splat(mean)) + high * (weights.high - splat(mean))) / spread;
        best_least = mean - best_scale * mean_q;
    }
    store_values(best, to);
    *scale = best_scale;
    *offset = -best_least;
}

static void round_to_8_bits(Group weights, uint8_t *to, float *scale) {
    const f32x16 low = larger(weights.low, -weights.low), high = larger(weights.high, -weights.high);
    const float largest = reduce_max(larger(low, high));
    const f32x16 inverse = splat(largest > 0x1p-100f ? 127.0f / largest : 0.0f), centre = splat(128.0f);
    store_values((Group){nearest(weights.low * inverse) + centre, nearest(weights.high * inverse) + centre}, to);
    *scale = largest / 127.0f;
}

static void round_rows(const void *context, int64_t first, int64_t end) {
    const Rounding *call = context;
    const int64_t num_groups = call->k / GROUP;
    for (int64_t group = first * num_groups; group < end * num_groups; group++) {
        const bf16 *from = call->weights + group * GROUP;
        const Group weights = {load_bf16(from), load_bf16(from + LANES)};
        if (call->offsets)
            round_to_4_bits(weights, call->values + group * GROUP, call->scales + group, call->offsets + group);
        else
            round_to_8_bits(weights, call->values + group * GROUP, call->scales + group);
    }
}

/* Round weights (n, k), k a multiple of 32, to values (n, k), scales and offsets (n, k / 32): to 4 bits, or to 8 bits if
 * offsets is NULL. */
void weft_round_groups(const bf16 *weights, int64_t n, int64_t k, uint8_t *values, float *scales, float *offsets) {
    const Rounding call = {weights, k, values, scales, offsets};
    run_loop(n, 16, round_rows, &call);
}
