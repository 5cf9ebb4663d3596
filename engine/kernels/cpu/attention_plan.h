/* Who computes what in a step's attention, decided once for all layers of a KV group. */
#ifndef WEFT_ATTENTION_PLAN_H
#define WEFT_ATTENTION_PLAN_H

#include <stdbool.h>
#include <stdint.h>

enum {
    CHUNK = 256,      /* tokens of context */
    BLOCK_ROWS = 32,  /* rows that are computed together: two tiles */
    ITEM_ROWS = 128,  /* rows of an item at most, unless one token has more */
};

/* Tokens that attend to chunks [first_chunk, end_chunk) of one request's context (or of contexts with equal blocks). */
typedef struct {
    int32_t request, first_token, num_tokens; /* tokens: a span of Plan.tokens */
    int32_t first_chunk, end_chunk;
    int32_t first_key, end_key;               /* positions that any of the tokens sees */
    int32_t is_split;                         /* one chunk of several: the results are parts, to be merged */
} Item;

/* A step as one KV group sees it. Mirrored in engine/kernels/cpu/attention.py; the caller fills the first four lines. */
typedef struct Plan {
    int64_t num_requests, num_tokens, table_width, block_size, num_heads, num_kv_heads, head_dim, window;
    double scale;
    const int64_t *query_starts, *seq_lens, *block_tables, *slots;
    int32_t *memory;
    int64_t memory_size; /* int32 that memory must have */
    int64_t num_items, num_work, num_parts, split_rows;
    Item *items;
    int32_t *tokens;                 /* token indices of the items */
    int32_t *positions;              /* (num_tokens) */
    int32_t *first_parts, *num_token_parts; /* (num_tokens) where a split token's parts are, ascending by chunk */
    int32_t *arrivals;               /* (num_tokens, num_kv_heads) parts that are there; the last one to come merges */
    int32_t *work;                   /* (num_work) item * num_kv_heads + head, in the order that threads take it */
} Plan;

static inline int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* The first position that a token sees; window 0 means all before it. */
static inline int64_t first_seen(const Plan *plan, int64_t position) {
    return plan->window ? max_of(0, position - plan->window + 1) : 0;
}

/* Query heads that share a K/V head. */
static inline int64_t group_size(const Plan *plan) { return plan->num_heads / plan->num_kv_heads; }

/* Floats of a part, which is what one query head got from one chunk: the result, its maximum and its sum. */
static inline int64_t part_values(const Plan *plan) { return plan->head_dim + 16; }

#endif
