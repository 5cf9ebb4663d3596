/* Linear layers over small integers: each group of 16 or 32 weights of an output has a scale and, in some forms, an offset.
 *
 * A weight is scale * (q - centre), or scale * q - offset, with q of 4 or 8 bits and without sign. Inputs are rounded to
 * int8, with a scale for each group of a row. So the sum over a group is a whole number, exact in any order, and only the
 * sums of groups are added as float32: the bits of a row do not depend on the number of rows, threads or instructions.
 *
 * Packed layout: panels of 16 outputs; in a panel, for every 64 inputs the weights, the scales and the offsets. Weights
 * lie as 64 bytes for four inputs of the 16 outputs. With 4 bits, a byte has an input of the first half of a group below
 * and one of the second half above. Scales and offsets are half precision, in units of a factor that each output has.
 */
#include "linear_run.h"

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

/* Where the byte of a weight of a panel lies, and how far its bits are shifted. */
INLINE int64_t place_of(Form form, int64_t output, int64_t input, int *shift) {
    const int64_t step = input / STEP, group = input % STEP / form.group, quads = form.group / 4;
    int64_t quad = input % form.group / 4, lines = quads;
    *shift = 0;
    if (form.bits == 4) {
        lines = quads / 2;
        *shift = quad < lines ? 0 : 4;
        quad %= lines;
    }
    return step * step_bytes(form) + ((group * lines + quad) * PANEL + output) * 4 + input % 4;
}

INLINE int64_t scale_place(Form form, int64_t output, int64_t input) {
    const int64_t group = input % STEP / form.group;
    return input / STEP * step_bytes(form) + weight_bytes(form) + (group * PANEL + output) * (int64_t)sizeof(uint16_t);
}

/* ---- half precision ------------------------------------------------------------------------------------------ */

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

/* ---- packing ------------------------------------------------------------------------------------------------- */

typedef struct {
    const uint8_t *values;           /* (n, k) */
    const uint16_t *scales, *offsets; /* (n, k / group) in half precision; offsets may be NULL */
    int64_t n, k;
    Form form;
    char *packed;
} Packing;

/* The inputs of a group, quad by quad; of 4 bits, quads of the second half lie above those of the first. */
static void pack_group(const Packing *call, int64_t row, int64_t num_rows, int64_t input, char *to) {
    const int quads = call->form.group / 4, are_halves = call->form.bits == 4, lines = are_halves ? quads / 2 : quads;
    for (int64_t line = 0; line < lines; line++) {
        for (int64_t r = 0; r < num_rows; r++) {
            const uint8_t *from = call->values + (row + r) * call->k + input + line * 4;
            uint32_t quad, above = 0;
            memcpy(&quad, from, sizeof quad);
            if (are_halves) memcpy(&above, from + lines * 4, sizeof above);
            quad |= above << 4;
            memcpy(to + (line * PANEL + r) * 4, &quad, sizeof quad);
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
            int shift;
            const int64_t input = g * form.group;
            pack_group(call, row, num_rows, input, panel + place_of(form, 0, input, &shift));
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
            const float q = (float)(byte >> shift & ((1 << form.bits) - 1)) - centre;
            call->to[row * call->k + i] = from_f32((half_to_f32(halves[0]) * q - half_to_f32(halves[1])) * call->factors[id]);
        }
    }
}

/* Unpack some outputs: rows `ids` of the packed matrix as (num_ids, k). */
void weft_gather_rows_grouped(const char *packed, const float *factors, int64_t form, int64_t k, const int64_t *ids,
                              int64_t num_ids, bf16 *to) {
    const Gathering call = {packed, factors, k, read_form(form), ids, to};
    run_loop(num_ids, 32, gather_rows, &call);
}

/* ---- inputs -------------------------------------------------------------------------------------------------- */

/* A row of inputs: padded_k of int8, the scales of their groups, and for each group what stands for the weights' centres
 * (whole) or offsets (float32). */
typedef union {
    int32_t whole;
    float real;
} Start;

INLINE int64_t row_bytes(int64_t padded_k, Form form) {
    return padded_k + padded_k / form.group * (int64_t)(sizeof(float) + sizeof(Start));
}

size_t rounded_bytes(const Job *job) {
    return (size_t)(job->rows * row_bytes(padded_inputs(job->k), read_form(job->form)) + 63) / 64 * 64;
}

typedef struct {
    const bf16 *inputs; /* (rows, stride) */
    int64_t stride, k, padded_k;
    Form form;
    char *to;
} Rounding;

/* Round LANES inputs; returns their sum. */
INLINE float round_inputs(f32x16 values, float inverse, int8_t *to) {
    const f32x16 shifted = values * splat(inverse) + splat(12582912.0f); /* 1.5 * 2^23: adding it rounds */
    const i8x16 bytes = __builtin_convertvector((i32x16)shifted, i8x16);
    memcpy(to, &bytes, sizeof bytes);
    return reduce_add(shifted - splat(12582912.0f));
}

static void round_rows(const void *context, int64_t first, int64_t end) {
    const Rounding *call = context;
    const Form form = call->form;
    const int64_t num_groups = call->padded_k / form.group;
    for (int64_t row = first; row < end; row++) {
        const bf16 *from = call->inputs + row * call->stride;
        int8_t *to = (int8_t *)call->to + row * row_bytes(call->padded_k, form);
        float *scales = (float *)(to + call->padded_k);
        Start *starts = (Start *)(scales + num_groups);
        for (int64_t g = 0; g < num_groups; g++, to += form.group) {
            bf16 last[2 * LANES] = {0};
            const bf16 *group = from + g * form.group;
            const int64_t left = call->k - g * form.group;
            if (left < form.group) group = left > 0 ? memcpy(last, group, (size_t)left * sizeof(bf16)) : last;
            const f32x16 low = load_bf16(group), high = form.group > LANES ? load_bf16(group + LANES) : splat(0.0f);
            const float largest = reduce_max(larger(larger(low, -low), larger(high, -high)));
            const float inverse = largest > 0x1p-100f ? 127.0f / largest : 0.0f;
            float sum = round_inputs(low, inverse, to);
            if (form.group > LANES) sum += round_inputs(high, inverse, to + LANES);
            scales[g] = sum == sum ? largest / 127.0f : sum; /* what is no number stays none, for all outputs */
            if (form.has_offset)
                starts[g].real = sum * scales[g];
            else
                starts[g].whole = sum == sum ? -(int32_t)sum * (1 << (form.bits - 1)) : 0;
        }
    }
}

void give_rounded(Job *job, const bf16 *inputs, void *memory) {
    const Rounding call = {inputs, job->input_stride, job->k, job->padded_k, read_form(job->form), memory};
    run_loop(job->rows, 4, round_rows, &call);
    job->inputs = memory;
}

/* ---- products ------------------------------------------------------------------------------------------------ */

typedef int32_t Dots __attribute__((vector_size(sizeof(Sums))));
typedef uint8_t Bytes __attribute__((vector_size(sizeof(Sums))));
enum { AHEAD_BYTES = 2048 };

#if defined(__AVX512F__)
enum { ROWS_AT_ONCE = 6, FEW_AT_ONCE = 3, FEW_COLUMNS = 4 }; /* of 32 registers 24 for sums, of groups and in total */
#else
enum { ROWS_AT_ONCE = 4, FEW_AT_ONCE = 4, FEW_COLUMNS = COLUMNS_AT_ONCE };
#endif

/* Add to each lane the products of its four weights and the four inputs. */
INLINE Dots add_dots(Dots total, Bytes weights, const int8_t *inputs) {
    int32_t quad;
    memcpy(&quad, inputs, sizeof quad);
#if defined(__AVX512VNNI__)
    return (Dots)_mm512_dpbusd_epi32((__m512i)total, (__m512i)weights, _mm512_set1_epi32(quad));
#elif defined(__AVX512F__)
    const __m512i all = _mm512_set1_epi32(quad), low = _mm512_and_si512((__m512i)weights, _mm512_set1_epi16(255));
    const __m512i even = _mm512_madd_epi16(low, _mm512_srai_epi16(_mm512_slli_epi16(all, 8), 8));
    const __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16((__m512i)weights, 8), _mm512_srai_epi16(all, 8));
    return total + (Dots)even + (Dots)odd;
#elif defined(__AVX2__)
    const __m256i all = _mm256_set1_epi32(quad), low = _mm256_and_si256((__m256i)weights, _mm256_set1_epi16(255));
    const __m256i even = _mm256_madd_epi16(low, _mm256_srai_epi16(_mm256_slli_epi16(all, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16((__m256i)weights, 8), _mm256_srai_epi16(all, 8));
    return total + (Dots)even + (Dots)odd;
#else
    const Dots lanes = (Dots)weights;
    (void)quad;
    total += (lanes & 255) * inputs[0] + (lanes >> 8 & 255) * inputs[1];
    return total + (lanes >> 16 & 255) * inputs[2] + (lanes >> 24 & 255) * inputs[3];
#endif
}

/* Without VNNI, products with weights of 4 bits are added as pairs: no more than 16 * 2 * 15 * 127, which 16 bits hold. */
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
enum { HAS_PAIRS = 1 };
#else
enum { HAS_PAIRS = 0 };
#endif

/* As `add_dots`, but the two halves of each lane are sums of their own. */
INLINE Dots add_pairs(Dots total, Bytes weights, const int8_t *inputs) {
    int32_t quad;
    memcpy(&quad, inputs, sizeof quad);
#if defined(__AVX512F__)
    const __m512i pairs = _mm512_maddubs_epi16((__m512i)weights, _mm512_set1_epi32(quad));
    return (Dots)_mm512_add_epi16((__m512i)total, pairs);
#elif defined(__AVX2__)
    const __m256i pairs = _mm256_maddubs_epi16((__m256i)weights, _mm256_set1_epi32(quad));
    return (Dots)_mm256_add_epi16((__m256i)total, pairs);
#else
    (void)weights;
    return total;
#endif
}

INLINE Dots add_products_of(Form form, Dots total, Bytes weights, const int8_t *inputs) {
    return HAS_PAIRS && form.bits == 4 ? add_pairs(total, weights, inputs) : add_dots(total, weights, inputs);
}

INLINE Dots join_pairs(Dots pairs) {
#if defined(__AVX512F__)
    return (Dots)_mm512_madd_epi16((__m512i)pairs, _mm512_set1_epi16(1));
#elif defined(__AVX2__)
    return (Dots)_mm256_madd_epi16((__m256i)pairs, _mm256_set1_epi16(1));
#else
    return pairs;
#endif
}

INLINE Bytes load_bytes(const char *from) {
    Bytes bytes;
    memcpy(&bytes, from, sizeof bytes);
    return bytes;
}

INLINE Sums splat_sums(float value) { return value - (Sums){0}; }

/* Add the sum over a group to that of a row, which has the scale of the group at of_row, and its start behind. */
INLINE Sums add_group(Sums total, Dots dots, Sums scales, Sums offsets, const float *of_row, int64_t num_groups, Form form) {
    total += splat_sums(of_row[0]) * (__builtin_convertvector(dots, Sums) * scales);
    return form.has_offset ? total - splat_sums(of_row[num_groups]) * offsets : total;
}

/* Up to ROWS_AT_ONCE rows times some panels of a unit. */
INLINE void multiply_block(const Job *job, const char *inputs, int rows, int columns, const char *const *panels, Form form,
                           float *sums) {
    const int64_t bytes_of_row = row_bytes(job->padded_k, form), num_groups = job->padded_k / form.group;
    const int lines = form.group / (form.bits == 4 ? 8 : 4), are_pairs = HAS_PAIRS && form.bits == 4;
    Sums totals[ROWS_AT_ONCE][UNIT_PANELS][PARTS] = {0};
    for (int64_t step = 0; step < job->padded_k / STEP; step++) {
        for (int64_t in_step = 0; in_step < STEP / form.group; in_step++) {
            const int64_t group = step * (STEP / form.group) + in_step;
            Dots dots[ROWS_AT_ONCE][UNIT_PANELS][PARTS];
            for (int row = 0; row < rows; row++) {
                const Start *starts = (const Start *)(inputs + row * bytes_of_row + job->padded_k) + num_groups;
                const Dots start = (form.has_offset || are_pairs ? 0 : starts[group].whole) - (Dots){0};
                for (int p = 0; p < columns; p++)
                    for (int part = 0; part < PARTS; part++) dots[row][p][part] = start;
            }
#pragma GCC unroll 8
            for (int line = 0; line < lines; line++) {
                const int8_t *quads = (const int8_t *)inputs + group * form.group + line * 4;
                for (int p = 0; p < columns; p++) {
                    const char *at = panels[p] + step * step_bytes(form) + (in_step * lines + line) * 64;
                    __builtin_prefetch(at + AHEAD_BYTES, 0, 2);
                    for (int part = 0; part < PARTS; part++) {
                        const Bytes bytes = load_bytes(at + part * sizeof(Bytes));
                        const Bytes low = form.bits == 4 ? bytes & 15 : bytes;
                        for (int row = 0; row < rows; row++)
                            dots[row][p][part] = add_products_of(form, dots[row][p][part], low, quads + row * bytes_of_row);
                        if (form.bits == 4)
                            for (int row = 0; row < rows; row++)
                                dots[row][p][part] = add_products_of(form, dots[row][p][part], bytes >> 4,
                                                         quads + row * bytes_of_row + form.group / 2);
                    }
                }
            }
            for (int p = 0; p < columns; p++) {
                const char *at = panels[p] + step * step_bytes(form) + weight_bytes(form) + in_step * PANEL * 2;
                for (int part = 0; part < PARTS; part++) {
                    const char *halves = at + part * PART_LANES * 2;
                    const Sums scales = load_halves(halves);
                    const Sums offsets = form.has_offset ? load_halves(halves + scale_bytes(form)) : scales;
                    for (int row = 0; row < rows; row++) {
                        const float *of_row = (const float *)(inputs + row * bytes_of_row + job->padded_k) + group;
                        Dots whole = dots[row][p][part];
                        if (are_pairs) whole = join_pairs(whole) + (form.has_offset ? 0 : ((const Start *)of_row)[num_groups].whole);
                        totals[row][p][part] = add_group(totals[row][p][part], whole, scales, offsets, of_row, num_groups, form);
                    }
                }
            }
        }
    }
    for (int row = 0; row < rows; row++)
        for (int p = 0; p < columns; p++)
            memcpy(sums + row * BLOCK_COLUMNS + p * PANEL, totals[row][p], PANEL * sizeof(float));
}

#if defined(__AMX_INT8__)

/* The weights of a group as bytes, for 16 outputs and four inputs in each line of 64; lies in `memory` if they have 4 bits. */
INLINE const char *group_bytes(const char *weights, Form form, char *memory) {
    if (form.bits == 8) return weights;
    for (int64_t at = 0; at < form.group / 8 * 64; at += 64) {
        const Bytes bytes = load_bytes(weights + at), low = bytes & 15, high = bytes >> 4;
        memcpy(memory + at, &low, sizeof low);
        memcpy(memory + at + form.group / 8 * 64, &high, sizeof high);
    }
    return memory;
}

/* 16 rows times a panel. A product of tiles gives the sums over a group, the same whole numbers as `multiply_block`. */
INLINE void multiply_tiles(const Job *job, const char *inputs, const char *panel, Form form, float *sums) {
    const int64_t bytes_of_row = row_bytes(job->padded_k, form), num_groups = job->padded_k / form.group;
    const int64_t in_step = STEP / form.group;
    _Alignas(64) char memory[32 / 4 * 64];
    _Alignas(64) Dots dots[TILE_ROWS];
    Sums totals[TILE_ROWS] = {0};
    for (int64_t group = 0; group < num_groups; group++) {
        const char *step = panel + group / in_step * step_bytes(form);
        const char *weights = step + group % in_step * (form.group * PANEL * form.bits / 8);
        const char *halves = step + weight_bytes(form) + group % in_step * PANEL * 2;
        _tile_zero(0);
        _tile_loadd(4, inputs + group * form.group, bytes_of_row);
        _tile_loadd(5, group_bytes(weights, form, memory), 64);
        _tile_dpbsud(0, 4, 5);
        _tile_stored(0, dots, sizeof(Dots));
        READS_MEMORY;
        const Sums scales = load_halves(halves), offsets = form.has_offset ? load_halves(halves + scale_bytes(form)) : scales;
        for (int row = 0; row < TILE_ROWS; row++) {
            const float *of_row = (const float *)(inputs + row * bytes_of_row + job->padded_k) + group;
            const int32_t start = form.has_offset ? 0 : ((const Start *)of_row)[num_groups].whole;
            totals[row] = add_group(totals[row], dots[row] + start, scales, offsets, of_row, num_groups, form);
        }
    }
    for (int row = 0; row < TILE_ROWS; row++) memcpy(sums + row * BLOCK_COLUMNS, totals + row, sizeof *totals);
}

/* As many rows of a unit as fill tiles; returns their number. */
INLINE int64_t compute_tiles(const Job *job, const Unit *unit, Form form) {
    float sums[TILE_ROWS * BLOCK_COLUMNS];
    int64_t done = 0;
    for (; unit->rows - done >= TILE_ROWS; done += TILE_ROWS) {
        const char *inputs = (const char *)job->inputs + (unit->row + done) * row_bytes(job->padded_k, form);
        for (int64_t p = 0; p < UNIT_PANELS; p++) multiply_tiles(job, inputs, unit->panels[p], form, sums + p * PANEL);
        finish_block(job, unit, unit->row + done, TILE_ROWS, sums);
    }
    return done;
}

#else

INLINE int64_t compute_tiles(const Job *job, const Unit *unit, Form form) {
    (void)job, (void)unit, (void)form;
    return 0;
}

#endif

/* A unit of any number of rows, in equal groups but for the last. */
INLINE void compute_form(const Job *job, const Unit *unit, Form form) {
    float sums[ROWS_AT_ONCE * BLOCK_COLUMNS];
    const int64_t first = compute_tiles(job, unit, form), num_rows = unit->rows - first;
    const int64_t num_parts = (num_rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE, bytes_of_row = row_bytes(job->padded_k, form);
    const int64_t part_rows = num_parts ? (num_rows + num_parts - 1) / num_parts : 0;
    for (int64_t done = first; done < unit->rows; done += part_rows) {
        const int64_t row = unit->row + done, left = unit->rows - done;
        const int64_t rows = left < part_rows ? left : part_rows;
        const char *inputs = (const char *)job->inputs + row * bytes_of_row;
        const int columns = rows <= FEW_AT_ONCE ? FEW_COLUMNS : COLUMNS_AT_ONCE;
        for (int64_t p = 0; p < UNIT_PANELS; p += columns) switch (rows) {
#define CASE(ROWS)                                                                                                        \
    case ROWS:                                                                                                            \
        multiply_block(job, inputs, ROWS, ROWS <= FEW_AT_ONCE ? FEW_COLUMNS : COLUMNS_AT_ONCE, unit->panels + p, form,    \
                       sums + p * PANEL);                                                                                 \
        break;
                CASE(1)
                CASE(2)
                CASE(3)
                CASE(4)
#if defined(__AVX512F__)
                CASE(5)
                CASE(6)
#endif
#undef CASE
            }
        finish_block(job, unit, row, rows, sums);
    }
}

#define FORM(BITS, GROUP, HAS_OFFSET) (BITS | GROUP << FORM_GROUP | HAS_OFFSET << FORM_OFFSET)

void compute_grouped_unit(const Job *job, const Unit *unit, int thread) {
    (void)thread;
#if defined(__AVX2__)
    switch (job->form) {
#define CASE(BITS, GROUP, HAS_OFFSET)                                 \
    case FORM(BITS, GROUP, HAS_OFFSET):                               \
        compute_form(job, unit, (Form){BITS, GROUP, HAS_OFFSET});     \
        break;
        CASE(4, 32, 0)
        CASE(4, 32, 1)
        CASE(8, 32, 0)
        CASE(8, 32, 1)
        CASE(8, 16, 0)
        CASE(8, 16, 1)
#undef CASE
    }
#else
    compute_form(job, unit, read_form(job->form));
#endif
}

/* `plan_job` for weights in groups; job.form is set. */
void plan_grouped_job(Job *job) {
    const Form form = read_form(job->form);
    plan_job(job);
    job->padded_k = padded_inputs(job->k);
    job->panel_bytes = job->padded_k / STEP * step_bytes(form);
}

/* Like `weft_linear`, with weights from `weft_pack_linear_grouped` and a factor for each output, padded to panels. */
void weft_linear_grouped(const bf16 *inputs, int64_t input_stride, int64_t rows, int64_t k, const char *weights,
                         const float *factors, int64_t form, int64_t n, const bf16 *bias, void *outputs,
                         int64_t output_stride, int64_t epilogue) {
    static Scratch scratch;
    Job job = {.rows = rows, .input_stride = input_stride, .k = k, .weights = weights, .scales = factors, .form = form,
               .bias = bias, .n = n, .outputs = outputs, .output_stride = output_stride, .epilogue = (Epilogue)epilogue};
    plan_grouped_job(&job);
    give_rounded(&job, inputs, scratch_reserve(&scratch, rounded_bytes(&job)));
    run_jobs(&job, 1, compute_grouped_unit);
}
