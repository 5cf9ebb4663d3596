/* Linear layers over small integers: each group of 16 or 32 weights of an output has a scale and, in some forms, an offset.
 *
 * A weight is scale * (q - centre), or scale * q - offset, with q of 4, 6 or 8 bits and without sign. Inputs are rounded to
 * int8, with a scale for each group of a row. So the sum over a group is a whole number, exact in any order, and only the
 * sums of groups are added as float32: the bits of a row do not depend on the number of rows, threads or instructions.
 *
 * Packed layout: panels of 16 outputs; in a panel, for every 64 inputs the weights, the scales and the offsets. Weights
 * lie as 64 bytes, a line, for four inputs of the 16 outputs. With 4 bits, a byte has an input of the first half of a group
 * below and one of the second half above. With 6 bits, the lower four of all 16 lines are so in 8, those of the first half
 * of the 64 inputs below, and the upper two in another 4 lines, those of the first quarter lowest. Scales and offsets are half precision, in units of a factor that each output has.
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

/* Where the byte of a weight of a panel lies, and how far its bits are shifted: with 6 bits, its lower four. */
INLINE int64_t place_of(Form form, int64_t output, int64_t input, int *shift) {
    const int64_t lines = form.bits == 8 ? 16 : form.bits == 6 ? 8 : form.group / 8; /* of which each has one or two quads */
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

/* ---- inputs -------------------------------------------------------------------------------------------------- */

/* Added to a whole number below 2^22, these are the bits of 1.5 * 2^23 plus that number: so it need not be converted, and
 * one instruction scales it exactly (its scale times 1.5 * 2^23 is exact, too). */
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

/* Inputs are rounded to tiles of one row, or of TILED for products of tiles. For each group a tile has the int8 of its rows,
 * then the rows' scales, then their starts. */
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

size_t rounded_bytes(const Job *job) {
    return (size_t)(padded_rows(job) * row_bytes(padded_inputs(job->k), read_form(job->form)) + 63) / 64 * 64;
}

typedef struct {
    const bf16 *inputs; /* (rows, stride) */
    int64_t rows, stride, k, padded_k;
    Form form;
    int64_t tile;
    char *to;
} Rounding;

/* Round LANES inputs; returns the whole numbers. */
INLINE f32x16 round_inputs(f32x16 values, float inverse, int8_t *to) {
    const f32x16 shifted = values * splat(inverse) + splat(12582912.0f); /* 1.5 * 2^23: adding it rounds */
#if defined(__AVX512F__)
    _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8((__m512i)shifted)); /* GCC converts lane by lane */
#else
    const i8x16 bytes = __builtin_convertvector((i32x16)shifted, i8x16);
    memcpy(to, &bytes, sizeof bytes);
#endif
    return shifted - splat(12582912.0f);
}

static void round_rows(const void *context, int64_t first, int64_t end) {
    const Rounding *call = context;
    const Form form = call->form;
    const int64_t tile = call->tile;
    for (int64_t row = first; row < end; row++) {
        const bf16 *from = call->inputs + row * call->stride;
        char *to = call->to + row / tile * tile * row_bytes(call->padded_k, form);
        for (int64_t input = 0; input < call->padded_k; input += form.group, to += tile * group_bytes(form)) {
            int8_t *values = (int8_t *)to + row % tile * form.group;
            float *scale = (float *)(to + tile * form.group) + row % tile;
            Start *start = (Start *)(scale + tile);
            bf16 last[2 * LANES] = {0};
            const bf16 *group = from + input;
            const int64_t left = row < call->rows ? call->k - input : 0;
            if (left < form.group) group = left > 0 ? memcpy(last, group, (size_t)left * sizeof(bf16)) : last;
            const f32x16 low = load_bf16(group), high = form.group > LANES ? load_bf16(group + LANES) : splat(0.0f);
            const float largest = reduce_max(larger(larger(low, -low), larger(high, -high)));
            const float inverse = largest > 0x1p-100f ? 127.0f / largest : 0.0f;
            f32x16 rounded = round_inputs(low, inverse, values);
            if (form.group > LANES) rounded += round_inputs(high, inverse, values + LANES);
            const float sum = reduce_add(rounded);
            *scale = sum == sum ? largest / 127.0f : sum; /* what is no number stays none, for all outputs */
            if (form.has_offset)
                start->real = sum * *scale;
            else
                start->whole = BASE - (sum == sum ? (int32_t)sum * (1 << (form.bits - 1)) : 0);
        }
    }
}

void give_rounded(Job *job, const bf16 *inputs, void *memory) {
    const Rounding call = {inputs, job->rows, job->input_stride, job->k, job->padded_k, read_form(job->form), rows_of_tile(job),
                           memory};
    run_loop(padded_rows(job), 4, round_rows, &call);
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

/* A line of 6 bits from the weights of a step, or a part of it. */
INLINE Bytes load_six(const char *from, int line) {
    const Bytes lower = load_bytes(from + line % 8 * 64), upper = load_bytes(from + (8 + line % 4) * 64);
    const Dots above = line < 8 ? (Dots)upper << (line < 4 ? 4 : 2) : (Dots)upper >> (line < 12 ? 0 : 2);
    return (line < 8 ? lower & 15 : lower >> 4) | ((Bytes)above & 48);
}

INLINE Sums splat_sums(float value) { return value - (Sums){0}; }

/* Scales and offsets of a part of 16 outputs. */
typedef struct {
    Sums scales, bases, offsets;
} Scales;

INLINE Scales load_scales(const char *halves, Form form, float factor) {
    const Sums scales = load_halves(halves) * factor;
    return (Scales){scales, scales * -BASE_VALUE, form.has_offset ? load_halves(halves + scale_bytes(form)) : scales};
}

/* The whole numbers of `dots`, to which BASE was added, times scales. */
INLINE Sums scale_dots(Dots dots, Scales of) {
#if defined(__AVX512F__)
    return (Sums)_mm512_fmadd_ps((__m512)dots, (__m512)of.scales, (__m512)of.bases);
#elif defined(__FMA__)
    return (Sums)_mm256_fmadd_ps((__m256)dots, (__m256)of.scales, (__m256)of.bases);
#else
    return __builtin_convertvector(dots, Sums) * of.scales;
#endif
}

/* Add the sum over a group to that of a row, whose inputs have this scale and start. */
INLINE Sums add_group(Sums total, Dots dots, Scales scales, float scale, Start start, Form form) {
    total += splat_sums(scale) * scale_dots(dots, scales);
    return form.has_offset ? total - splat_sums(start.real) * scales.offsets : total;
}

INLINE Start start_of(const char *group, Form form) { return *(const Start *)(group + form.group + sizeof(float)); }

/* Up to ROWS_AT_ONCE rows times some panels of a unit. */
INLINE void multiply_block(const Job *job, const char *inputs, int rows, int columns, const char *const *panels, Form form,
                           float *sums) {
    const int64_t bytes_of_row = row_bytes(job->padded_k, form);
    const int lines = form.group / (form.bits == 4 ? 8 : 4), are_pairs = HAS_PAIRS && form.bits == 4;
    Sums totals[ROWS_AT_ONCE][UNIT_PANELS][PARTS] = {0};
    for (int64_t step = 0; step < job->padded_k / STEP; step++) {
#pragma GCC unroll 4
        for (int in_step = 0; in_step < STEP / form.group; in_step++) {
            const char *group = inputs + (step * (STEP / form.group) + in_step) * group_bytes(form);
            Dots dots[ROWS_AT_ONCE][UNIT_PANELS][PARTS];
            for (int row = 0; row < rows; row++) {
                const int32_t base = form.has_offset ? BASE : start_of(group + row * bytes_of_row, form).whole;
                const Dots start = (are_pairs ? 0 : base) - (Dots){0};
                for (int p = 0; p < columns; p++)
                    for (int part = 0; part < PARTS; part++) dots[row][p][part] = start;
            }
#pragma GCC unroll 8
            for (int line = 0; line < lines; line++) {
                const int8_t *quads = (const int8_t *)group + line * 4;
                for (int p = 0; p < columns; p++) {
                    const char *of_step = panels[p] + step * step_bytes(form), *at = of_step + (in_step * lines + line) * 64;
                    if (form.bits != 6 || in_step * lines + line < 12) __builtin_prefetch(at + AHEAD_BYTES, 0, 2);
                    for (int part = 0; part < PARTS; part++) {
                        const int64_t first = part * (int64_t)sizeof(Bytes);
                        const Bytes bytes = form.bits == 6 ? load_six(of_step + first, in_step * lines + line) : load_bytes(at + first);
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
                    const Scales scales = load_scales(halves, form, 1.0f);
                    for (int row = 0; row < rows; row++) {
                        const float scale = *(const float *)(group + row * bytes_of_row + form.group);
                        const Start start = start_of(group + row * bytes_of_row, form);
                        Dots whole = dots[row][p][part];
                        if (are_pairs) whole = join_pairs(whole) + (form.has_offset ? BASE : start.whole);
                        totals[row][p][part] = add_group(totals[row][p][part], whole, scales, scale, start, form);
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

enum { BLOCK_INPUTS = 1024, PASS_ROWS = 256 }; /* whose weights stay in the first-level cache; whose sums in the second */
enum { UNPACK_AHEAD = 2 };
enum { BLOCK_BYTES = BLOCK_INPUTS * PANEL };

/* Where the weights of a group begin in a panel: with 6 bits, those of its step. */
INLINE int64_t weights_at(Form form, int64_t group) {
    const int64_t in_step = STEP / form.group, step = group / in_step * step_bytes(form);
    return form.bits == 6 ? step : step + group % in_step * (form.group * PANEL * form.bits / 8);
}

INLINE int64_t scales_at(Form form, int64_t group) { return scale_place(form, 0, group * form.group); }

/* Weights as bytes: 16 outputs and four inputs in each line of 64. If the form has a centre, they have a sign, and those of
 * 4 bits are 16 times as large, which takes fewer instructions. */
INLINE void unpack_line(const char *from, Form form, char *low_to, char *high_to) {
    const Bytes bytes = load_bytes(from), above = (Bytes)((Dots)bytes << 4);
    const Bytes low = form.bits == 8 ? bytes ^ 128 : form.has_offset ? bytes & 15 : (above & 240) ^ 128;
    const Bytes high = form.has_offset ? bytes >> 4 : (bytes & 240) ^ 128;
    __builtin_prefetch(from + AHEAD_BYTES, 0, 2);
    memcpy(low_to, &low, sizeof low);
    if (form.bits == 4) memcpy(high_to, &high, sizeof high);
}

/* The group of these lines of a step of 6 bits. */
INLINE void unpack_six(const char *from, Form form, int first, char *to) {
    const uint8_t centre = form.has_offset ? 0 : 32;
#pragma GCC unroll 8
    for (int line = 0; line < form.group / 4; line++, to += 64) {
        const Bytes bytes = load_six(from, first + line) - centre;
        if (first + line < 12) __builtin_prefetch(from + (first + line) * 64 + AHEAD_BYTES, 0, 2);
        memcpy(to, &bytes, sizeof bytes);
    }
}

INLINE void unpack_group(const char *panel, Form form, int64_t group, char *to) {
    const char *from = panel + weights_at(form, group);
    const int lines = form.group * form.bits / 32;
    if (form.bits == 6) {
        switch (group % (STEP / form.group)) {
            case 0: unpack_six(from, form, 0, to); break;
            case 1: unpack_six(from, form, form.group / 4, to); break;
            case 2: unpack_six(from, form, 8, to); break;
            case 3: unpack_six(from, form, 12, to); break;
        }
        return;
    }
#pragma GCC unroll 8
    for (int line = 0; line < lines; line++) unpack_line(from + line * 64, form, to + line * 64, to + (lines + line) * 64);
}

/* A panel and some rows of inputs; `unpacked` are the weights as bytes from group `first` on. */
typedef struct {
    const char *inputs, *panel;
    char *unpacked;
    int64_t first, end;
} Tiling;

/* Sums over a group of 8 or 16 rows and 16 outputs are computed in two tiles by turns. A product takes 50 cycles and is
 * stored two groups later; meanwhile others are scaled. */
INLINE void start_product(const Tiling *call, Form form, int rows, int turn, int64_t group) {
    const char *inputs = call->inputs + group * TILE_ROWS * group_bytes(form);
    const char *weights = call->unpacked + (group - call->first) * form.group * PANEL;
    if (form.bits == 8 && form.has_offset) weights = call->panel + weights_at(form, group);
#define PRODUCT(SUMS, INPUTS, WEIGHTS)                  \
    _tile_zero(SUMS);                                   \
    _tile_loadd(INPUTS, inputs, form.group);            \
    _tile_loadd(WEIGHTS, weights, 64);                  \
    if (form.has_offset)                                \
        _tile_dpbsud(SUMS, INPUTS, WEIGHTS);            \
    else                                                \
        _tile_dpbssd(SUMS, INPUTS, WEIGHTS);
    if (rows == TILE_ROWS) {
        if (turn) { PRODUCT(1, 2, 3) } else { PRODUCT(0, 2, 3) }
    } else {
        if (turn) { PRODUCT(5, 6, 7) } else { PRODUCT(4, 6, 7) }
    }
#undef PRODUCT
}

INLINE void store_product(int rows, int turn, Dots *dots) {
    if (rows == TILE_ROWS) {
        if (turn) _tile_stored(1, dots, sizeof *dots); else _tile_stored(0, dots, sizeof *dots);
    } else {
        if (turn) _tile_stored(5, dots, sizeof *dots); else _tile_stored(4, dots, sizeof *dots);
    }
    READS_MEMORY;
}

INLINE void add_sums(const Tiling *call, Form form, int rows, int64_t group, const Dots *dots, Sums *totals) {
    const Scales scales = load_scales(call->panel + scales_at(form, group), form, form.bits == 4 && !form.has_offset ? 0.0625f : 1.0f);
    const float *of_rows = (const float *)(call->inputs + group * TILE_ROWS * group_bytes(form) + TILE_ROWS * form.group);
    const Start *starts = (const Start *)(of_rows + TILE_ROWS);
#pragma GCC unroll 16
    for (int row = 0; row < rows; row++)
        totals[row] = add_group(totals[row], dots[row] + BASE, scales, of_rows[row], starts[row], form);
}

/* Add to the sums of 8 or 16 rows the products of some groups of a panel. At the first rows the weights are unpacked. */
INLINE void multiply_panel(const Tiling *call, Form form, int rows, int is_first, float *sums) {
    const int is_unpacking = is_first && (form.bits < 8 || !form.has_offset);
    _Alignas(64) Dots dots[2][TILE_ROWS];
    Sums totals[TILE_ROWS];
    for (int row = 0; row < rows; row++) totals[row] = call->first ? load_f32(sums + row * BLOCK_COLUMNS) : splat(0.0f);
    for (int64_t next = call->first - UNPACK_AHEAD; next < call->end + 3;) {
#pragma GCC unroll 2
        for (int turn = 0; turn < 2; turn++, next++) {
            const int64_t ahead = next + UNPACK_AHEAD;
            if (is_unpacking && ahead < call->end)
                unpack_group(call->panel, form, ahead, call->unpacked + (ahead - call->first) * form.group * PANEL);
            if (next - 2 < call->end && next - 2 >= call->first) store_product(rows, turn, dots[turn]);
            if (next < call->end && next >= call->first) start_product(call, form, rows, turn, next);
            if (next - 3 < call->end && next - 3 >= call->first) add_sums(call, form, rows, next - 3, dots[!turn], totals);
        }
    }
    for (int row = 0; row < rows; row++) store_f32(sums + row * BLOCK_COLUMNS, totals[row]);
}

INLINE void multiply_pass(const Job *job, const char *inputs, int64_t rows, const char *const *panels, Form form, float *sums) {
    _Alignas(64) char unpacked[BLOCK_BYTES];
    const int64_t bytes_of_row = row_bytes(job->padded_k, form), num_groups = job->padded_k / form.group;
    for (int64_t first = 0; first < num_groups; first += BLOCK_INPUTS / form.group) {
        const int64_t left = num_groups - first, most = BLOCK_INPUTS / form.group;
        for (int64_t p = 0; p < UNIT_PANELS; p++) {
            Tiling call = {inputs, panels[p], unpacked, first, first + (left < most ? left : most)};
            for (int64_t row = 0; row < rows; row += TILE_ROWS) {
                call.inputs = inputs + row * bytes_of_row;
                float *to = sums + row * BLOCK_COLUMNS + p * PANEL;
                if (rows - row <= TILE_ROWS / 2)
                    multiply_panel(&call, form, TILE_ROWS / 2, row == 0, to);
                else
                    multiply_panel(&call, form, TILE_ROWS, row == 0, to);
            }
        }
    }
}

/* A unit of any number of rows, as tiles. */
INLINE void compute_tiles(const Job *job, const Unit *unit, Form form) {
    _Alignas(64) float sums[PASS_ROWS * BLOCK_COLUMNS];
    for (int64_t done = 0; done < unit->rows; done += PASS_ROWS) {
        const int64_t left = unit->rows - done, rows = left < PASS_ROWS ? left : PASS_ROWS;
        const char *inputs = (const char *)job->inputs + (unit->row + done) * row_bytes(job->padded_k, form);
        multiply_pass(job, inputs, rows, unit->panels, form, sums);
        finish_block(job, unit, unit->row + done, rows, sums);
    }
}

#else

INLINE void compute_tiles(const Job *job, const Unit *unit, Form form) { (void)job, (void)unit, (void)form; }

#endif

/* A unit of any number of rows, in equal groups but for the last. */
INLINE void compute_form(const Job *job, const Unit *unit, Form form) {
    float sums[ROWS_AT_ONCE * BLOCK_COLUMNS];
    if (rows_of_tile(job) > 1) {
        compute_tiles(job, unit, form);
        return;
    }
    const int64_t num_parts = (unit->rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE, bytes_of_row = row_bytes(job->padded_k, form);
    const int64_t part_rows = (unit->rows + num_parts - 1) / num_parts;
    for (int64_t done = 0; done < unit->rows; done += part_rows) {
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
        CASE(6, 16, 0)
        CASE(6, 16, 1)
        CASE(6, 32, 0)
        CASE(6, 32, 1)
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
