/* Rows times panels of integers in groups, with dot products of bytes: for few rows, and where there are no tiles. */
#ifndef WEFT_GROUPED_PRODUCT_H
#define WEFT_GROUPED_PRODUCT_H

#include "grouped_layout.h"

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
#if defined(__AVX512VNNI__)
    int32_t quad;
    memcpy(&quad, inputs, sizeof quad);
    return (Dots)_mm512_dpbusd_epi32((__m512i)total, (__m512i)weights, _mm512_set1_epi32(quad));
#else
    const Dots lanes = (Dots)weights;
    total += (lanes & 255) * inputs[0] + (lanes >> 8 & 255) * inputs[1];
    return total + (lanes >> 16 & 255) * inputs[2] + (lanes >> 24 & 255) * inputs[3];
#endif
}

/* Without VNNI, two products are added in 16 bits. Of 4 bits a whole group is: no more than 8 * 2 * 15 * 127. */
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
enum { HAS_PAIRS = 1 };
#else
enum { HAS_PAIRS = 0 };
#endif

/* Products of bytes without and with sign, each two of them added. Where the weights have a sign, too, it moves to the
 * inputs. */
INLINE Dots multiply_pairs(Bytes weights, Dots inputs, int are_signed) {
#if defined(__AVX512F__)
    const __m512i from = (__m512i)weights, to = (__m512i)inputs, zero = _mm512_setzero_si512();
    if (!are_signed) return (Dots)_mm512_maddubs_epi16(from, to);
    return (Dots)_mm512_maddubs_epi16(_mm512_abs_epi8(from), _mm512_mask_sub_epi8(to, _mm512_movepi8_mask(from), zero, to));
#elif defined(__AVX2__)
    const __m256i from = (__m256i)weights, to = (__m256i)inputs;
    if (!are_signed) return (Dots)_mm256_maddubs_epi16(from, to);
    return (Dots)_mm256_maddubs_epi16(_mm256_abs_epi8(from), _mm256_sign_epi8(to, from));
#else
    (void)weights, (void)are_signed; /* not reached: see HAS_PAIRS */
    return inputs;
#endif
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

INLINE int is_signed(Form form) { return HAS_PAIRS && form.bits == 8 && !form.has_offset; }

/* Add products with a line of weights. Of 8 bits without an offset the centre is taken off first: 16 bits hold a pair so. */
INLINE Dots add_products_of(Form form, Dots total, Bytes weights, const int8_t *inputs) {
    if (!HAS_PAIRS) return add_dots(total, weights, inputs);
    int32_t quad;
    memcpy(&quad, inputs, sizeof quad);
    const Dots all = quad - (Dots){0};
    if (form.bits == 8 && form.has_offset) /* 16 bits hold pairs of their halves */
        return total + join_pairs(multiply_pairs(weights & 15, all, 0)) +
               (join_pairs(multiply_pairs(weights >> 4, all, 0)) << 4);
    const Dots pairs = multiply_pairs(is_signed(form) ? weights ^ 128 : weights, all, is_signed(form));
    typedef int16_t Halves __attribute__((vector_size(sizeof(Sums))));
    return form.bits == 4 ? (Dots)((Halves)total + (Halves)pairs) : total + join_pairs(pairs);
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
                const int32_t centres = start_of(group + row * bytes_of_row, form).whole;
                const int32_t base = form.has_offset || is_signed(form) ? BASE : centres;
                const Dots start = (are_pairs ? 0 : base) - (Dots){0};
                for (int p = 0; p < columns; p++)
                    for (int part = 0; part < PARTS; part++) dots[row][p][part] = start;
            }
#pragma GCC unroll 8
            for (int line = 0; line < lines; line++) {
                const int8_t *quads = (const int8_t *)group + line * 4;
                for (int p = 0; p < columns; p++) {
                    const int place = in_step * lines + line;
                    const char *of_step = panels[p] + step * step_bytes(form), *at = of_step + place * 64;
                    if (form.bits != 6 || place < 12) __builtin_prefetch(at + AHEAD_BYTES, 0, 2);
                    for (int part = 0; part < PARTS; part++) {
                        const int64_t first = part * (int64_t)sizeof(Bytes);
                        const Bytes bytes = form.bits == 6 ? load_six(of_step + first, place) : load_bytes(at + first);
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

/* Rows times panels of integers in groups, with AMX: the sums over a group are a product of tiles.
 *
 * Beside tiles, a core computes one float vector per cycle instead of two, but as many of integers: so sums are not
 * converted (see BASE). Whatever the rows, the whole numbers are those of grouped_product.h, and so are the results. */

#if defined(__AMX_INT8__)

enum { BLOCK_INPUTS = 1024, BLOCK_BYTES = BLOCK_INPUTS * PANEL }; /* whose weights stay in the first-level cache */
enum { PASS_ROWS = 256 };                                          /* whose sums stay in the second-level cache */
enum { UNPACK_AHEAD = 2 };                                         /* groups */

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
    const float factor = form.bits == 4 && !form.has_offset ? 0.0625f : 1.0f; /* see `unpack_line` */
    const Scales scales = load_scales(call->panel + scales_at(form, group), form, factor);
    const char *inputs = call->inputs + group * TILE_ROWS * group_bytes(form);
    const float *of_rows = (const float *)(inputs + TILE_ROWS * form.group);
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
            if (next - 3 < call->end && next - 3 >= call->first)
                add_sums(call, form, rows, next - 3, dots[!turn], totals);
        }
    }
    for (int row = 0; row < rows; row++) store_f32(sums + row * BLOCK_COLUMNS, totals[row]);
}

/* The sums of up to PASS_ROWS rows and the panels of a unit. */
INLINE void multiply_pass(const Job *job, const char *inputs, int64_t rows, const char *const *panels, Form form,
                          float *sums) {
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

#endif
