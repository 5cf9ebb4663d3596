/* AMX: eight registers of 16 rows x 64 bytes, and the product of two of them (Intel SDM volume 1, chapter 18). */
#ifndef WEFT_TILES_H
#define WEFT_TILES_H

#include "vectors.h"

#if defined(__AMX_BF16__)

#define TILE_ROWS 16
#define TILE_PAIRS 16                     /* pairs of bfloat16 in a row of 64 bytes */
#define TILE_VALUES (TILE_ROWS * 2 * TILE_PAIRS)

/* GCC does not know that these instructions read memory, so it could move earlier stores after them. */
#define READS_MEMORY __asm__ volatile("" ::: "memory")
#undef _tile_loadd
#define _tile_loadd(tile, from, stride)                  \
    do {                                                 \
        READS_MEMORY;                                    \
        _tile_loadd_internal(tile, from, stride);        \
    } while (0)

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} TileShapes;

/* Configure eight tiles for the calling thread. Tiles 0 to 4 have num_rows rows, since fewer rows are loaded, multiplied
 * and stored faster. Rows of inputs, in tile 4, have input_bytes, so weights, in the others, have a quarter as many rows.
 * Every parallel region does this: other libraries configure tiles too. */
INLINE void shape_tiles(int64_t num_rows, int64_t input_bytes) {
    TileShapes shapes = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        shapes.row_bytes[tile] = tile == 4 ? (uint16_t)input_bytes : 64;
        shapes.rows[tile] = (uint8_t)(tile <= 4 ? num_rows : input_bytes / 4);
    }
    READS_MEMORY;
    _tile_loadconfig(&shapes);
}

INLINE void open_tiles(void) { shape_tiles(TILE_ROWS, 64); }

INLINE void close_tiles(void) { _tile_release(); }

#else

INLINE void open_tiles(void) {}
INLINE void close_tiles(void) {}

#endif
#endif
