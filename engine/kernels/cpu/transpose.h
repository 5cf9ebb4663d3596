/* Transposes 16 x 16 values of 32 bits, or 8 x 8 of 64 bits, in registers. */
#ifndef WEFT_TRANSPOSE_H
#define WEFT_TRANSPOSE_H

#include "vectors.h"

/* Take a matrix as 2 x 2 squares of 8 (4, 2, 1) lanes and exchange the two squares off the diagonal. */
INLINE void swap_8(u32x16 *upper, u32x16 *lower) {
    const u32x16 first = *upper, second = *lower;
    *upper = __builtin_shuffle(first, second, (u32x16){0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23});
    *lower = __builtin_shuffle(first, second, (u32x16){8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31});
}

INLINE void swap_4(u32x16 *upper, u32x16 *lower) {
    const u32x16 first = *upper, second = *lower;
    *upper = __builtin_shuffle(first, second, (u32x16){0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27});
    *lower = __builtin_shuffle(first, second, (u32x16){4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31});
}

INLINE void swap_2(u32x16 *upper, u32x16 *lower) {
    const u32x16 first = *upper, second = *lower;
    *upper = __builtin_shuffle(first, second, (u32x16){0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29});
    *lower = __builtin_shuffle(first, second, (u32x16){2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31});
}

INLINE void swap_1(u32x16 *upper, u32x16 *lower) {
    const u32x16 first = *upper, second = *lower;
    *upper = __builtin_shuffle(first, second, (u32x16){0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30});
    *lower = __builtin_shuffle(first, second, (u32x16){1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31});
}

/* Each round halves the size of the squares that are still to be transposed. */
INLINE void transpose(u32x16 lines[LANES]) {
    for (int row = 0; row < 8; row++) swap_8(&lines[row], &lines[row + 8]);
    for (int row = 0; row < LANES; row += row % 4 == 3 ? 5 : 1) swap_4(&lines[row], &lines[row + 4]);
    for (int row = 0; row < LANES; row += row % 2 == 1 ? 3 : 1) swap_2(&lines[row], &lines[row + 2]);
    for (int row = 0; row < LANES; row += 2) swap_1(&lines[row], &lines[row + 1]);
}

/* Exchange the inner two of every four lanes of 16 bits. */
INLINE u32x16 swap_inner(u32x16 line) {
    typedef uint16_t Words __attribute__((vector_size(64)));
    return (u32x16)__builtin_shuffle((Words)line, (Words){0,  2,  1,  3,  4,  6,  5,  7,  8,  10, 9,  11, 12, 14, 13, 15,
                                                          16, 18, 17, 19, 20, 22, 21, 23, 24, 26, 25, 27, 28, 30, 29, 31});
}

/* Take the lines as 8 x 8 lanes of 64 bits. */
INLINE void transpose_wide(u32x16 lines[8]) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) swap_8(&lines[i], &lines[i + 4]);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) swap_4(&lines[i + i / 2 * 2], &lines[i + i / 2 * 2 + 2]);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) swap_2(&lines[2 * i], &lines[2 * i + 1]);
}

#endif
