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

/* Configure the tiles of the calling thread. Every parallel region does this: other libraries configure tiles too. */
INLINE void load_shapes(TileShapes shapes) {
    shapes.palette = 1;
    READS_MEMORY;
    _tile_loadconfig(&shapes);
}

/* Tiles 0 to 4 have num_rows rows, since fewer rows are loaded, multiplied and stored faster. */
INLINE void shape_tiles(int64_t num_rows) {
    TileShapes shapes = {0};
    for (int tile = 0; tile < 8; tile++) {
        shapes.row_bytes[tile] = 64;
        shapes.rows[tile] = tile <= 4 ? (uint8_t)num_rows : TILE_ROWS;
    }
    load_shapes(shapes);
}

INLINE void open_tiles(void) { shape_tiles(TILE_ROWS); }

/* For products over `group` bytes: tiles 0 and 1 are the sums of 16 rows and outputs, 2 the rows' inputs, and 3 the weights;
 * tiles 4 to 7 are the same for 8 rows. */
INLINE void shape_group_tiles(int64_t group) {
    TileShapes shapes = {0};
    for (int tile = 0; tile < 8; tile++) {
        const int num_rows = tile < 4 ? TILE_ROWS : TILE_ROWS / 2;
        shapes.row_bytes[tile] = tile % 4 == 2 ? (uint16_t)group : 64;
        shapes.rows[tile] = (uint8_t)(tile % 4 == 3 ? group / 4 : num_rows);
    }
    load_shapes(shapes);
}

INLINE void close_tiles(void) { _tile_release(); }

#else

INLINE void open_tiles(void) {}
INLINE void close_tiles(void) {}

#endif
#endif
