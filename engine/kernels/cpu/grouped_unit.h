/* A unit of a linear layer over small integers in groups: rows times the panels of a unit.
 *
 * The forms are compiled in two files, side by side, since each is a function of thousands of instructions: they are
 * most of what there is to compile. */
#ifndef WEFT_GROUPED_UNIT_H
#define WEFT_GROUPED_UNIT_H

#include "grouped_tiles.h"

/* A unit of any number of rows, in equal groups but for the last. */
INLINE void compute_form(const Job *job, const Unit *unit, Form form) {
    float sums[ROWS_AT_ONCE * BLOCK_COLUMNS];
    if (rows_of_tile(job) > 1) {
        compute_tiles(job, unit, form);
        return;
    }
    const int64_t num_parts = (unit->rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
    const int64_t bytes_of_row = row_bytes(job->padded_k, form);
    const int64_t part_rows = (unit->rows + num_parts - 1) / num_parts;
    for (int64_t done = 0; done < unit->rows; done += part_rows) {
        const int64_t row = unit->row + done, left = unit->rows - done;
        const int64_t rows = left < part_rows ? left : part_rows;
        const char *inputs = (const char *)job->inputs + row * bytes_of_row;
        const int columns = rows <= FEW_AT_ONCE ? FEW_COLUMNS : COLUMNS_AT_ONCE;
        for (int64_t p = 0; p < UNIT_PANELS; p += columns) switch (rows) {
#define ROWS_CASE(ROWS)                                                                                                        \
    case ROWS:                                                                                                            \
        multiply_block(job, inputs, ROWS, ROWS <= FEW_AT_ONCE ? FEW_COLUMNS : COLUMNS_AT_ONCE, unit->panels + p, form,    \
                       sums + p * PANEL);                                                                                 \
        break;
                ROWS_CASE(1)
                ROWS_CASE(2)
                ROWS_CASE(3)
                ROWS_CASE(4)
#if defined(__AVX512F__)
                ROWS_CASE(5)
                ROWS_CASE(6)
#endif
#undef ROWS_CASE
            }
        finish_block(job, unit, row, rows, sums);
    }
}

/* Each form in a function of its own: the compiler's time grows faster than the length of a function. */
#define FORMS(WITH) WITH(4, 32) WITH(6, 16) WITH(6, 32) WITH(8, 32) WITH(8, 16)
#define FUNCTION(BITS, GROUP)                                                                          \
    static __attribute__((noinline)) void compute_##BITS##_##GROUP(const Job *job, const Unit *unit) { \
        compute_form(job, unit, (Form){BITS, GROUP, HAS_OFFSET});                                      \
    }
#define CASE(BITS, GROUP)                                                                              \
    case BITS | GROUP << FORM_GROUP | HAS_OFFSET << FORM_OFFSET:                                       \
        compute_##BITS##_##GROUP(job, unit);                                                           \
        break;

/* A unit of a form that has an offset, or has none. */
void compute_offset_unit(const Job *job, const Unit *unit);
void compute_centred_unit(const Job *job, const Unit *unit);

#endif
