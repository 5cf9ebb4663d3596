/* Vectors of 16 lanes and bfloat16, for all instruction sets from one source.
 *
 * The compiler maps these vectors to what the target has, for example two AVX2 registers. Intrinsics appear only where
 * the compiler has no other way to an instruction. Everything is inline; nothing allocates.
 */
#ifndef WEFT_VECTORS_H
#define WEFT_VECTORS_H


#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#pragma GCC diagnostic ignored "-Wpsabi" /* 64-byte vectors never cross the boundary of a shared object */

typedef uint16_t bf16;
typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef int16_t i16x16 __attribute__((vector_size(32)));
typedef int8_t i8x16 __attribute__((vector_size(16)));

#define INLINE static inline __attribute__((always_inline))
#define LANES 16

INLINE f32x16 splat(float value) { return value - (f32x16){0}; }

INLINE u32x16 splat_bits(uint32_t bits) { return bits - (u32x16){0}; }

INLINE f32x16 load_f32(const float *from) {
    f32x16 values;
    memcpy(&values, from, sizeof values);
    return values;
}

INLINE void store_f32(float *to, f32x16 values) { memcpy(to, &values, sizeof values); }

INLINE u32x16 load_bits(const void *from) {
    u32x16 bits;
    memcpy(&bits, from, sizeof bits);
    return bits;
}

INLINE void store_bits(void *to, u32x16 bits) { memcpy(to, &bits, sizeof bits); }

INLINE float to_f32(bf16 value) {
    uint32_t bits = (uint32_t)value << 16;
    float result;
    memcpy(&result, &bits, sizeof result);
    return result;
}

/* 16 bfloat16 values, widened. */
INLINE f32x16 load_bf16(const bf16 *from) {
    u16x16 halves;
    memcpy(&halves, from, sizeof halves);
    return (f32x16)(__builtin_convertvector(halves, u32x16) << 16);
}

/* 16 int8, widened; intrinsics, because GCC 12 converts lane by lane. */
INLINE f32x16 load_i8(const char *from) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
#elif defined(__AVX2__)
    __m256 halves[2];
    for (int half = 0; half < 2; half++)
        halves[half] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(from + 8 * half))));
    f32x16 values;
    memcpy(&values, halves, sizeof values);
    return values;
#else
    i8x16 line;
    memcpy(&line, from, sizeof line);
    return __builtin_convertvector(line, f32x16);
#endif
}

/* Round to the nearest bfloat16, ties to even. */
INLINE bf16 from_f32(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

/* Round to the nearest bfloat16, ties to even; NaN stays NaN. */
INLINE u16x16 to_bf16(f32x16 values) {
#if defined(__AVX512BF16__)
    return (u16x16)_mm512_cvtneps_pbh((__m512)values);
#else
    u32x16 bits = (u32x16)values;
    u32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    u32x16 is_number = (u32x16)(values == values);
    return __builtin_convertvector((rounded & is_number) | (0x7fc0 & ~is_number), u16x16);
#endif
}

INLINE void store_bf16(bf16 *to, f32x16 values) {
    u16x16 halves = to_bf16(values);
    memcpy(to, &halves, sizeof halves);
}

INLINE f32x16 larger(f32x16 a, f32x16 b) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_max_ps((__m512)a, (__m512)b);
#else
    i32x16 is_larger = a > b;
    return (f32x16)(((i32x16)a & is_larger) | ((i32x16)b & ~is_larger));
#endif
}

INLINE f32x16 smaller(f32x16 a, f32x16 b) { return -larger(-a, -b); }

/* Sum and maximum of the lanes, always in the same order. */
#define REDUCE(NAME, COMBINE)                                                                                          \
    INLINE float NAME(f32x16 values) {                                                                                 \
        values = COMBINE(values, __builtin_shuffle(values, (i32x16){8, 9, 10, 11, 12, 13, 14, 15, 0}));                \
        values = COMBINE(values, __builtin_shuffle(values, (i32x16){4, 5, 6, 7, 0}));                                  \
        values = COMBINE(values, __builtin_shuffle(values, (i32x16){2, 3, 0}));                                        \
        return COMBINE(values, __builtin_shuffle(values, (i32x16){1, 0}))[0];                                          \
    }
#define ADD(A, B) ((A) + (B))
REDUCE(reduce_add, ADD)
REDUCE(reduce_max, larger)
#undef ADD
#undef REDUCE

/* exp of values, within 2 units in the last place between -87 and 88; zero below -87, exp(88) above 88.
 *
 * 2^(whole part) times a polynomial of the fractional part, with the coefficients of Cephes' expf. */
INLINE f32x16 vector_exp(f32x16 values) {
    u32x16 is_tiny = (u32x16)(values < -87.0f);
    values = (f32x16)(((u32x16)values & ~is_tiny)); /* these results become zero at the end */
    i32x16 is_large = values > 88.0f;
    values = (f32x16)(((i32x16)values & ~is_large) | ((i32x16)splat(88.0f) & is_large));
    const f32x16 magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to a whole number */
    f32x16 shifted = values * 1.44269504f + magic;
    f32x16 whole = shifted - magic;
    f32x16 rest = values - whole * 0.693359375f;
    rest = rest + whole * 2.12194440e-4f;
    f32x16 power = splat(1.9875691500e-4f);
    power = power * rest + 1.3981999507e-3f;
    power = power * rest + 8.3334519073e-3f;
    power = power * rest + 4.1665795894e-2f;
    power = power * rest + 1.6666665459e-1f;
    power = power * rest + 5.0000001201e-1f;
    power = power * rest * rest + rest + 1.0f;
    i32x16 exponent = __builtin_convertvector(whole, i32x16) + 127;
    return (f32x16)((u32x16)(power * (f32x16)(exponent << 23)) & ~is_tiny);
}

/* GELU (Hendrycks and Gimpel, 2016): x less x times the share of the normal distribution above |x|, which is a polynomial
 * times exp(-x^2 / 2) (Abramowitz and Stegun, 7.1.26, to 1e-7). */
INLINE f32x16 gelu(f32x16 values) {
    const f32x16 size = larger(values, -values), part = 1.0f / (1.0f + 0.2316418882f * size);
    f32x16 share = splat(0.5307027145f);
    share = share * part - 0.7265760135f;
    share = share * part + 0.7107068705f;
    share = share * part - 0.142248368f;
    share = share * part + 0.1274147960f;
    return larger(values, splat(0.0f)) - size * share * part * vector_exp(-0.5f * values * values);
}

/* Prefetch 16 lines (1 KB) into the second-level cache. A first-level or non-temporal hint reads memory at half the
 * speed, because the second level has three times as many requests in flight. */
INLINE void prefetch_tile(const void *from) {
    for (int line = 0; line < 16; line++) __builtin_prefetch((const char *)from + 64 * line, 0, 2);
}

/* Transposes 16 x 16 values of 32 bits, or 8 x 8 of 64 bits, in registers. */

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
