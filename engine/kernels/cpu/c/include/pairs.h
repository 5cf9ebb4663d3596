/* Products of pairs of bfloat16, the unit in which weights, keys and values are stored.
 *
 * If the CPU has an instruction for such pairs, both sides stay bfloat16. Otherwise the side that is used repeatedly is
 * widened to float32 beforehand, and the other side as it is loaded; the first of a pair is added before the second.
 */
#ifndef WEFT_PAIRS_H
#define WEFT_PAIRS_H

#include "vectors.h"

/* Sums have the length of a register, because GCC keeps longer vectors in memory. */
#if defined(__AVX512F__)
typedef f32x16 Sums;
enum { PARTS = 1, COLUMNS_AT_ONCE = 2 };
#else
typedef float f32x8 __attribute__((vector_size(32)));
typedef uint32_t u32x8 __attribute__((vector_size(32)));
typedef f32x8 Sums;
enum { PARTS = 2, COLUMNS_AT_ONCE = 1 };
#endif
enum { PART_LANES = LANES / PARTS };

/* Two lines of 16 int8 as pairs of bfloat16, which has all of their values. */
INLINE u32x16 pairs_of_lines(const char *from) { return (u32x16)load_i8(from) >> 16 | (u32x16)load_i8(from + LANES); }

#if defined(__AVX512BF16__)

/* A value on the left of a product. */
typedef bf16 Input;

/* A part of 16 pairs on the right. */
typedef u32x16 Pair;

INLINE Pair load_pair(const char *from, int part) { return load_bits(from + part * sizeof(Sums)); }

INLINE Pair load_rounded_pair(const char *from, int part) {
    (void)part;
    return pairs_of_lines(from);
}

/* total + inputs[0] * the first of every pair + inputs[1] * the second. */
INLINE Sums add_products(Sums total, const Input *inputs, Pair pair) {
    uint32_t values;
    memcpy(&values, inputs, sizeof values);
    return (Sums)_mm512_dpbf16_ps((__m512)total, (__m512bh)splat_bits(values), (__m512bh)pair);
}

/* 32 values as inputs. */
INLINE void store_inputs(Input *to, f32x16 low, f32x16 high) {
    store_bits(to, (u32x16)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
}

#else

typedef float Input;

typedef struct {
    Sums first, second;
} Pair;

INLINE Pair load_pair(const char *from, int part) {
#if defined(__AVX512F__)
    const u32x16 bits = load_bits(from);
#else
    u32x8 bits;
    memcpy(&bits, from + part * sizeof bits, sizeof bits);
#endif
    (void)part;
    return (Pair){(Sums)(bits << 16), (Sums)(bits & 0xffff0000u)};
}

INLINE Sums load_rounded(const char *from) {
#if defined(__AVX512F__)
    return load_i8(from);
#elif defined(__AVX2__)
    return (Sums)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)));
#else
    Sums values;
    for (int lane = 0; lane < PART_LANES; lane++) values[lane] = (signed char)from[lane];
    return values;
#endif
}

INLINE Pair load_rounded_pair(const char *from, int part) {
    from += part * PART_LANES;
    return (Pair){load_rounded(from), load_rounded(from + LANES)};
}

INLINE Sums add_products(Sums total, const Input *inputs, Pair pair) {
    total += inputs[0] * pair.first;
    return total + inputs[1] * pair.second;
}

INLINE void store_inputs(Input *to, f32x16 low, f32x16 high) {
    store_f32(to, low);
    store_f32(to + LANES, high);
}

#endif

/* `count` values of bfloat16 as inputs. */
INLINE void copy_inputs(Input *to, const bf16 *from, int64_t count) {
#if defined(__AVX512BF16__)
    memcpy(to, from, (size_t)count * sizeof(bf16));
#else
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store_f32(to + i, load_bf16(from + i));
    for (; i < count; i++) to[i] = to_f32(from[i]);
#endif
}

#endif
