/* Products of rows and keys, and of weights and values, in tiles: 16 x 32 inputs on the left, 16 x 16 float32 results. */
#ifndef WEFT_ATTENTION_PRODUCT_H
#define WEFT_ATTENTION_PRODUCT_H

#include "attention_cache.h"
#include "pairs.h"
#include "tiles.h"

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

#endif
