/* The plan of a step's attention: which tokens attend to which chunks. Made once for all layers of a KV group. */
#ifndef WEFT_ATTENTION_PLAN_H
#define WEFT_ATTENTION_PLAN_H

#include <stdbool.h>
#include <stdint.h>

enum {
    CHUNK = 256,      /* tokens of context */
    BLOCK_ROWS = 32,  /* rows that are computed together: two tiles */
    ITEM_ROWS = 128,  /* most rows of an item, unless one token has more */
};

/* Tokens that attend to chunks [first_chunk, end_chunk) of one request, or of several requests with equal blocks. */
typedef struct {
    int32_t request, first_token, num_tokens; /* a span of Plan.tokens */
    int32_t first_chunk, end_chunk;
    int32_t first_key, end_key;               /* positions that at least one of the tokens sees */
    int32_t is_split;                         /* has one chunk of several: its results are parts, to be merged */
} Item;

/* A step as one KV group sees it. Mirrored in engine/kernels/cpu/attention.py; the caller fills the first seven lines. */
typedef struct Plan {
    int64_t num_requests, num_tokens, table_width, block_size, num_heads, num_kv_heads, head_dim, value_dim;
    int64_t window, span, is_latent; /* the values of latents are the first value_dim values of the keys, kept alone */
    int64_t ahead;                   /* later positions that a token sees, if they are there; 0 is causal */
    int64_t is_rounded;              /* the cache is int8, with a scale for each token's K and V of a head */
    double scale, soft_cap;          /* soft_cap 0 means none */
    const float *slopes;             /* (num_heads) ALiBi, or NULL */
    const int64_t *query_starts, *seq_lens, *block_tables, *slots;
    int32_t *memory;
    int64_t memory_size; /* int32 that memory must have */
    int64_t num_items, num_work, num_parts, split_rows;
    Item *items;
    int32_t *tokens;                 /* token indices of the items */
    int32_t *positions;              /* (num_tokens) */
    int32_t *first_parts, *num_token_parts; /* (num_tokens) index and number of a split token's parts, by chunk */
    int32_t *arrivals;               /* (num_tokens, num_kv_heads) parts computed; the thread with the last one merges */
    int32_t *work;                   /* (num_work) item * num_kv_heads + head, in the order in which threads take it */
} Plan;

static inline int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* The first position that a token sees; window 0 means no window, span 0 no spans. */
static inline int64_t first_seen(const Plan *plan, int64_t position) {
    if (plan->span) return position - position % plan->span;
    return plan->window ? max_of(0, position - plan->window + 1) : 0;
}

/* The position behind the last one that a token of a request sees. */
static inline int64_t end_seen(const Plan *plan, int64_t request, int64_t position) {
    return min_of(position + 1 + plan->ahead, plan->seq_lens[request]);
}

/* Query heads that share a K/V head. */
static inline int64_t group_size(const Plan *plan) { return plan->num_heads / plan->num_kv_heads; }

/* Floats of a part, the result of one query head for one chunk: weighted values, maximum and sum. */
static inline int64_t part_values(const Plan *plan) { return plan->value_dim + 16; }

#endif
