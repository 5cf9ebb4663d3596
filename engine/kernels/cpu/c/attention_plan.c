/* Plans a step's attention; attention.c carries the plan out. */
#include <string.h>

#include "attention_plan.h"
#include "pool.h"

enum { SPLIT_ROWS = 32 };            /* requests with at most this many rows are split into their chunks */
enum { MAX_PART_BYTES = 128 << 20 }; /* most memory for the parts of all split requests */

static int64_t num_queries(const Plan *plan, int64_t request) {
    return plan->query_starts[request + 1] - plan->query_starts[request];
}

/* Split requests share chunks with equal blocks, and even a single one keeps all threads busy. */
static bool is_split(const Plan *plan, int64_t request) {
    return num_queries(plan, request) * group_size(plan) <= plan->split_rows;
}

static int64_t count_parts(const Plan *plan) {
    int64_t parts = 0;
    for (int64_t request = 0; request < plan->num_requests; request++)
        if (is_split(plan, request)) parts += num_queries(plan, request) * ceil_div(plan->seq_lens[request], CHUNK);
    return parts;
}

/* If parts would take too much memory, split only requests of one token, or none. */
static void choose_split_rows(Plan *plan) {
    const int64_t most = MAX_PART_BYTES / (plan->num_heads * part_values(plan) * (int64_t)sizeof(float));
    if (plan->ahead) { /* a row's chunks do not end with its own */
        plan->split_rows = 0;
        return;
    }
    plan->split_rows = max_of(SPLIT_ROWS, group_size(plan));
    if (count_parts(plan) > most) plan->split_rows = group_size(plan);
    if (count_parts(plan) > most) plan->split_rows = 0;
}

/* Set memory_size, the number of int32 that the plan's memory must hold. */
void weft_size_attention_plan(Plan *plan) {
    choose_split_rows(plan);
    int64_t items = 0; /* an upper bound: every item has at least one token */
    for (int64_t request = 0; request < plan->num_requests; request++)
        items += num_queries(plan, request) * (is_split(plan, request) ? ceil_div(plan->seq_lens[request], CHUNK) : 1);
    const int64_t item_values = sizeof(Item) / sizeof(int32_t) + plan->num_kv_heads + 1;
    plan->memory_size = items * item_values + plan->num_tokens * (3 + plan->num_kv_heads);
}

static Item *add_item(Plan *plan, int64_t request, int64_t first_chunk, int64_t end_chunk, bool split) {
    Item *item = &plan->items[plan->num_items++];
    Item *before = item - 1;
    *item = (Item){.request = (int32_t)request, .first_chunk = (int32_t)first_chunk, .end_chunk = (int32_t)end_chunk,
                   .first_key = INT32_MAX, .is_split = split};
    item->first_token = plan->num_items > 1 ? before->first_token + before->num_tokens : 0;
    return item;
}

/* All tokens of an item must be added before the next item is. */
static void add_token(Plan *plan, Item *item, int64_t token) {
    int64_t position = plan->positions[token];
    plan->tokens[item->first_token + item->num_tokens++] = (int32_t)token;
    item->first_key = (int32_t)min_of(item->first_key, first_seen(plan, position));
    item->end_key = (int32_t)max_of(item->end_key, end_seen(plan, item->request, position));
}

/* Chains of requests for one chunk: those in one bucket of the hash table, and those with equal blocks. */
typedef struct {
    int32_t next_in_bucket, next_alike, last_alike; /* -1 ends a chain; only the first of those alike has last_alike */
} Link;

enum { BUCKETS = 1024 };

static bool reaches(const Plan *plan, int64_t request, int64_t chunk) {
    int64_t first_position = plan->seq_lens[request] - num_queries(plan, request);
    return chunk * CHUNK < plan->seq_lens[request] && chunk >= first_seen(plan, first_position) / CHUNK;
}

/* Whether two requests have the same blocks in a chunk, filled to the same position. */
static bool are_alike(const Plan *plan, int64_t a, int64_t b, int64_t chunk) {
    int64_t end = min_of(plan->seq_lens[a], (chunk + 1) * CHUNK), first_block = chunk * CHUNK / plan->block_size;
    int64_t num_blocks = ceil_div(end, plan->block_size) - first_block;
    return end == min_of(plan->seq_lens[b], (chunk + 1) * CHUNK) &&
           !memcmp(plan->block_tables + a * plan->table_width + first_block,
                   plan->block_tables + b * plan->table_width + first_block, (size_t)num_blocks * sizeof(int64_t));
}

/* Link the split requests that reach the chunk. */
static void link_alike(const Plan *plan, int64_t chunk, Link *links) {
    int32_t buckets[BUCKETS];
    memset(buckets, -1, sizeof buckets);
    for (int64_t request = 0; request < plan->num_requests; request++) {
        links[request] = (Link){-1, -1, -1};
        if (!is_split(plan, request) || !reaches(plan, request, chunk)) continue;
        int64_t block = plan->block_tables[request * plan->table_width + chunk * CHUNK / plan->block_size];
        int32_t *bucket = &buckets[block % BUCKETS], first = *bucket;
        while (first >= 0 && !are_alike(plan, first, request, chunk)) first = links[first].next_in_bucket;
        if (first >= 0) {
            links[links[first].last_alike].next_alike = (int32_t)request;
            links[first].last_alike = (int32_t)request;
        } else {
            links[request] = (Link){*bucket, -1, (int32_t)request};
            *bucket = (int32_t)request;
        }
    }
}

/* Plan one chunk of all split requests. Requests with equal blocks share items, so that memory is read once for them. */
static void plan_chunk(Plan *plan, int64_t chunk, int64_t item_tokens, Link *links) {
    link_alike(plan, chunk, links);
    for (int64_t first = 0; first < plan->num_requests; first++) {
        if (links[first].last_alike < 0) continue;
        Item *item = NULL;
        for (int64_t request = first; request >= 0; request = links[request].next_alike)
            for (int64_t token = plan->query_starts[request]; token < plan->query_starts[request + 1]; token++) {
                int64_t position = plan->positions[token];
                if (position < chunk * CHUNK || first_seen(plan, position) >= (chunk + 1) * CHUNK) continue;
                if (!item || item->num_tokens == item_tokens) item = add_item(plan, request, chunk, chunk + 1, true);
                add_token(plan, item, token);
            }
    }
}

/* A request with many tokens: each item takes some of them through their whole context. */
static void plan_whole(Plan *plan, int64_t request, int64_t item_tokens) {
    int64_t first_item = plan->num_items, start = plan->query_starts[request];
    /* Backwards: the longest items first, so that no thread is left with a long one at the end. */
    for (int64_t end = plan->query_starts[request + 1]; end > start; end -= item_tokens) {
        int64_t begin = max_of(start, end - item_tokens);
        Item *item = add_item(plan, request, first_seen(plan, plan->positions[begin]) / CHUNK,
                              ceil_div(end_seen(plan, request, plan->positions[end - 1]), CHUNK), false);
        for (int64_t token = begin; token < end; token++) add_token(plan, item, token);
    }
    /* Head by head: the keys and values of one head then stay in the second-level cache. */
    for (int64_t head = 0; head < plan->num_kv_heads; head++)
        for (int64_t item = first_item; item < plan->num_items; item++)
            plan->work[plan->num_work++] = (int32_t)(item * plan->num_kv_heads + head);
}

static void plan_tokens(Plan *plan, int64_t request) {
    for (int64_t token = plan->query_starts[request]; token < plan->query_starts[request + 1]; token++) {
        int64_t position = plan->seq_lens[request] - plan->query_starts[request + 1] + token;
        plan->positions[token] = (int32_t)position;
        plan->first_parts[token] = (int32_t)plan->num_parts;
        plan->num_token_parts[token] = 0;
        if (!is_split(plan, request)) continue;
        plan->num_token_parts[token] = (int32_t)(position / CHUNK - first_seen(plan, position) / CHUNK + 1);
        plan->num_parts += plan->num_token_parts[token];
    }
}

/* Plan a step, for all layers of the group. plan->memory holds memory_size int32. */
void weft_plan_attention(Plan *plan) {
    static Scratch scratch;
    Link *links = scratch_reserve(&scratch, (size_t)plan->num_requests * sizeof(Link));
    plan->num_items = plan->num_work = plan->num_parts = 0;
    plan->positions = plan->memory;
    plan->first_parts = plan->positions + plan->num_tokens;
    plan->num_token_parts = plan->first_parts + plan->num_tokens;
    plan->arrivals = plan->num_token_parts + plan->num_tokens;
    int64_t arrivals = plan->num_tokens * plan->num_kv_heads, num_rows = 0, num_chunks = 0, num_items = 0;
    memset(plan->arrivals, 0, (size_t)arrivals * sizeof(int32_t));
    for (int64_t request = 0; request < plan->num_requests; request++) {
        int64_t queries = num_queries(plan, request);
        plan_tokens(plan, request);
        num_items += is_split(plan, request) ? queries * ceil_div(plan->seq_lens[request], CHUNK) : queries;
        if (is_split(plan, request))
            num_chunks = max_of(num_chunks, ceil_div(plan->seq_lens[request], CHUNK));
        else
            num_rows += queries * plan->num_heads;
    }
    plan->items = (Item *)(plan->arrivals + arrivals);
    plan->work = (int32_t *)(plan->items + num_items);
    plan->tokens = plan->work + num_items * plan->num_kv_heads;
    const int64_t group = group_size(plan);
    /* Smaller items if the step would otherwise have too few for the threads. */
    int64_t rows = min_of(max_of(num_rows / (4 * num_threads()), BLOCK_ROWS), ITEM_ROWS);
    for (int64_t request = 0; request < plan->num_requests; request++)
        if (!is_split(plan, request)) plan_whole(plan, request, max_of(rows / group, 1));
    int64_t first_split = plan->num_items;
    for (int64_t chunk = 0; chunk < num_chunks; chunk++) plan_chunk(plan, chunk, max_of(ITEM_ROWS / group, 1), links);
    for (int64_t index = first_split * plan->num_kv_heads; index < plan->num_items * plan->num_kv_heads; index++)
        plan->work[plan->num_work++] = (int32_t)index;
}

