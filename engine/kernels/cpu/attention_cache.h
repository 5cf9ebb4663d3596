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

/* Offset of a unit of keys in a layer's cache, in values. */
static inline int64_t unit_offset(const Plan *plan, int64_t block, int64_t head, int64_t unit) {
    const int64_t sides = plan->is_latent ? 1 : 2;
    return ((block * plan->num_kv_heads + head) * sides * plan->block_size + unit * UNIT) * plan->head_dim;
}

/* Offset from a unit of keys to the unit of values for the same tokens, in values. */
static inline int64_t values_offset(const Plan *plan) { return plan->is_latent ? 0 : plan->block_size * plan->head_dim; }

static inline bool is_woven(const Plan *plan) { return plan->block_size % STEP == 0; }

static inline void write_key(const Plan *plan, bf16 *cache, int64_t slot, int64_t head, const bf16 *key) {
    int64_t unit = slot % plan->block_size / UNIT;
    bf16 *to = cache + unit_offset(plan, slot / plan->block_size, head, unit) + slot % UNIT * 2;
    for (int64_t pair = 0; pair < plan->head_dim / 2; pair++) memcpy(to + pair * 2 * UNIT, key + 2 * pair, 4);
}

static inline void write_value(const Plan *plan, bf16 *cache, int64_t slot, int64_t head, const bf16 *value) {
    int64_t tokens = is_woven(plan) ? STEP : UNIT, unit = slot % plan->block_size / tokens * (tokens / UNIT);
    bf16 *to = cache + unit_offset(plan, slot / plan->block_size, head, unit) + values_offset(plan);
    to += slot % tokens / 2 * 2 * LANES;
    const uint32_t shift = slot % 2 * 16, kept = 0xffff0000u >> shift;
    for (int64_t dim = 0; dim < plan->head_dim; dim += LANES, to += tokens * LANES)
        store_bits(to, (load_bits(to) & kept) | ((u32x16)load_bf16(value + dim) >> (16 - shift)));
}

/* The first token from `token` on that does not share a pair of the V cache with the token before it. Threads that
 * start there never write to one pair at the same time. */
static inline int64_t pair_start(const Plan *plan, int64_t token) {
    bool is_second = token > 0 && token < plan->num_tokens && plan->slots[token] % 2 == 1;
    return is_second && plan->slots[token] == plan->slots[token - 1] + 1 ? token + 1 : token;
}

#endif
