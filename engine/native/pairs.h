/* Products of pairs of bfloat16, the unit in which weights, keys and values are laid out.
 *
 * Where an instruction takes such pairs, both sides stay as they are. Elsewhere the side that is used again and again
 * is widened to float32 beforehand, the other one when it is loaded; the first of a pair is added before the second.
 */
#ifndef WEFT_PAIRS_H
#define WEFT_PAIRS_H

#include "vectors.h"

#if defined(__AVX512BF16__)

/* A value on the left of a product. */
typedef bf16 Input;

/* 16 pairs on the right. */
typedef u32x16 Pair;

INLINE Pair load_pair(const char *from) { return load_bits(from); }

/* From 16 values of int8, then the 16 that belong to them. */
INLINE Pair load_int8_pair(const int8_t *from) { return widen_pairs(from); }

/* total + inputs[0] * the first of every pair + inputs[1] * the second. */
INLINE f32x16 add_products(f32x16 total, const Input *inputs, Pair pair) {
    uint32_t values;
    memcpy(&values, inputs, sizeof values);
    return (f32x16)_mm512_dpbf16_ps((__m512)total, (__m512bh)splat_bits(values), (__m512bh)pair);
}

/* 32 values as inputs. */
INLINE void store_inputs(Input *to, f32x16 low, f32x16 high) {
    store_bits(to, (u32x16)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
}

#else

typedef float Input;

typedef struct {
    f32x16 first, second;
} Pair;

INLINE Pair load_pair(const char *from) {
    const u32x16 bits = load_bits(from);
    return (Pair){(f32x16)(bits << 16), (f32x16)(bits & 0xffff0000u)};
}

INLINE Pair load_int8_pair(const int8_t *from) { return (Pair){load_int8(from), load_int8(from + LANES)}; }

INLINE f32x16 add_products(f32x16 total, const Input *inputs, Pair pair) {
    total += splat(inputs[0]) * pair.first;
    return total + splat(inputs[1]) * pair.second;
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
