/* Addresses of a token's keys and values in the cache; attention.c describes the layout. */
#ifndef WEFT_ATTENTION_CACHE_H
#define WEFT_ATTENTION_CACHE_H

#include "attention_plan.h"
#include "vectors.h"

enum {
    UNIT = 16, /* tokens */
    STEP = 32, /* tokens that one product of weights and values covers */
    CHUNK_UNITS = CHUNK / UNIT,
    CHUNK_STEPS = CHUNK / STEP,
    MAX_STEPS = 640 / STEP, /* the most steps of a product: those of the longest head */
};

/* Bytes of the keys, or of the values, of a block and head. */
static inline int64_t side_bytes(const Plan *plan) {
    return plan->block_size * plan->head_dim * (plan->is_rounded ? (int64_t)sizeof(int8_t) : (int64_t)sizeof(bf16));
}

static inline int64_t unit_bytes(const Plan *plan) { return side_bytes(plan) / plan->block_size * UNIT; }

static inline int64_t scale_bytes(const Plan *plan) {
    return plan->is_rounded ? plan->block_size * (int64_t)sizeof(float) : 0;
}

/* Offset of the keys of a block and head in a layer's cache. */
static inline int64_t keys_offset(const Plan *plan, int64_t block, int64_t head) {
    const int64_t sides = plan->is_latent ? 1 : 2;
    return (block * plan->num_kv_heads + head) * sides * (side_bytes(plan) + scale_bytes(plan));
}

/* Offset from there to the values of the same tokens. */
static inline int64_t values_offset(const Plan *plan) { return plan->is_latent ? 0 : side_bytes(plan); }

/* Offset from there to the scales of keys; those of values follow. */
static inline int64_t scales_offset(const Plan *plan) { return 2 * side_bytes(plan); }

static inline bool is_woven(const Plan *plan) { return plan->block_size % STEP == 0; }

static inline void write_key(const Plan *plan, char *keys, int64_t index, const bf16 *key) {
    bf16 *to = (bf16 *)(keys + index / UNIT * unit_bytes(plan)) + index % UNIT * 2;
    for (int64_t pair = 0; pair < plan->head_dim / 2; pair++) memcpy(to + pair * 2 * UNIT, key + 2 * pair, 4);
}

static inline void write_value(const Plan *plan, char *values, int64_t index, const bf16 *value) {
    const int64_t tokens = is_woven(plan) ? STEP : UNIT;
    bf16 *to = (bf16 *)(values + index / tokens * (tokens / UNIT) * unit_bytes(plan)) + index % tokens / 2 * 2 * LANES;
    const uint32_t shift = index % 2 * 16, kept = 0xffff0000u >> shift;
    for (int64_t dim = 0; dim < plan->head_dim; dim += LANES, to += tokens * LANES)
        store_bits(to, (load_bits(to) & kept) | ((u32x16)load_bf16(value + dim) >> (16 - shift)));
}

/* Round `dim` values to int8, 16 a line, lines `stride` bytes apart. Returns the scale, NaN unless all are finite. */
static inline float round_head(const bf16 *from, int64_t dim, int8_t *to, int64_t stride) {
    f32x16 most = {0}, zeros = {0};
    for (int64_t at = 0; at < dim; at += LANES) {
        const f32x16 values = load_bf16(from + at);
        most = larger(most, (f32x16)((u32x16)values & 0x7fffffffu));
        zeros += values * 0.0f; /* a maximum would hide NaN */
    }
    const float scale = reduce_max(most) / 127 + reduce_add(zeros), factor = scale > 0 ? 1 / scale : 0;
    const f32x16 magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to a whole number */
    for (int64_t at = 0; at < dim; at += LANES, to += stride) {
        i8x16 line = __builtin_convertvector((i32x16)(load_bf16(from + at) * factor + magic), i8x16);
        memcpy(to, &line, sizeof line);
    }
    return scale;
}

/* Write a token's key and value of a head in int8, and their scales. */
static inline void write_rounded(const Plan *plan, char *keys, int64_t index, const bf16 *key, const bf16 *value) {
    int8_t line[MAX_STEPS * STEP], *to = (int8_t *)keys + index / UNIT * unit_bytes(plan);
    float scales[2] = {round_head(key, plan->head_dim, line, LANES)};
    for (int64_t dim = 0; dim < plan->head_dim; dim++) to[dim * UNIT + index % UNIT] = line[dim];
    const int64_t tokens = is_woven(plan) ? STEP : UNIT;
    to = (int8_t *)keys + values_offset(plan) + index / tokens * (tokens / UNIT) * unit_bytes(plan);
    scales[1] = round_head(value, plan->head_dim, to + index % tokens * LANES, tokens * LANES);
    for (int side = 0; side < 2; side++)
        memcpy(keys + scales_offset(plan) + side * scale_bytes(plan) + index * (int64_t)sizeof(float), scales + side,
               sizeof(float));
}

/* The first token from `token` on that does not share a pair of the V cache with the token before it. Threads that
 * start there never write to one pair at the same time. */
static inline int64_t pair_start(const Plan *plan, int64_t token) {
    bool is_second = token > 0 && token < plan->num_tokens && plan->slots[token] % 2 == 1;
    return is_second && plan->slots[token] == plan->slots[token - 1] + 1 ? token + 1 : token;
}

#endif
