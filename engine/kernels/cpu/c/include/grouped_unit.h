/* Units of linear layers over small integers in groups, in any form and for any number of rows.
 *
 * They are half of what there is to compile, so two files share the forms, and two cores compile them side by side. */
#ifndef WEFT_GROUPED_UNIT_H
#define WEFT_GROUPED_UNIT_H

#include "grouped_product.h"

/* Some rows, as many as the function is made for, times COLUMNS_AT_ONCE panels, or FEW_COLUMNS. */
typedef void MultiplyRows(const Job *job, const char *inputs, const char *const *panels, float *sums);

/* A unit of any number of rows, in equal groups but for the last; `multiply` has a function for each number from 1. */
INLINE void compute_form(const Job *job, const Unit *unit, Form form, MultiplyRows *const *multiply) {
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
        for (int64_t p = 0; p < UNIT_PANELS; p += columns)
            multiply[rows - 1](job, inputs, unit->panels + p, sums + p * PANEL);
        finish_block(job, unit, row, rows, sums);
    }
}

/* Each in a function of its own: the compiler's time grows faster than the length of a function. */
#define ROWS_FUNCTION(NAME, FORM, ROWS)                                                                               \
    static __attribute__((noinline)) void multiply_##NAME##_##ROWS(const Job *job, const char *inputs,                \
                                                                   const char *const *panels, float *sums) {          \
        multiply_block(job, inputs, ROWS, ROWS <= FEW_AT_ONCE ? FEW_COLUMNS : COLUMNS_AT_ONCE, panels, FORM, sums);   \
    }
#if defined(__AVX512F__)
#define MORE_ROWS_FUNCTIONS(NAME, FORM) ROWS_FUNCTION(NAME, FORM, 5) ROWS_FUNCTION(NAME, FORM, 6)
#define MORE_ROWS(NAME) , multiply_##NAME##_5, multiply_##NAME##_6
#else
#define MORE_ROWS_FUNCTIONS(NAME, FORM)
#define MORE_ROWS(NAME)
#endif
#define UNIT_FUNCTION(NAME, FORM)                                                                                     \
    ROWS_FUNCTION(NAME, FORM, 1) ROWS_FUNCTION(NAME, FORM, 2) ROWS_FUNCTION(NAME, FORM, 3)                            \
    ROWS_FUNCTION(NAME, FORM, 4) MORE_ROWS_FUNCTIONS(NAME, FORM)                                                      \
    static __attribute__((noinline)) void compute_##NAME(const Job *job, const Unit *unit) {                          \
        static MultiplyRows *const multiply[ROWS_AT_ONCE] = {                                                         \
            multiply_##NAME##_1, multiply_##NAME##_2, multiply_##NAME##_3, multiply_##NAME##_4 MORE_ROWS(NAME)};      \
        compute_form(job, unit, FORM, multiply);                                                                      \
    }

/* The forms of a file, which sets HAS_OFFSET: WITH(bits, group). */
#define FORMS(WITH) WITH(4, 32) WITH(6, 16) WITH(6, 32) WITH(8, 32) WITH(8, 16)
#define FUNCTION(BITS, GROUP) UNIT_FUNCTION(BITS##_##GROUP, ((Form){BITS, GROUP, HAS_OFFSET}))
#define CASE(BITS, GROUP)                                                                                             \
    case BITS | GROUP << FORM_GROUP | HAS_OFFSET << FORM_OFFSET: compute_##BITS##_##GROUP(job, unit); break;

/* A unit of a form that has an offset, or has none. */
void compute_offset_unit(const Job *job, const Unit *unit);
void compute_centred_unit(const Job *job, const Unit *unit);

#endif
