/* Paged attention over a bfloat16 cache, for decodes and prefill chunks in one call.
 *
 * The context of a request is cut at fixed positions into chunks. For each row (one query head of one token) and chunk:
 * scores, their maximum, exponentials, their sum, the weighted sum of values; the chunks of a row are then merged in
 * ascending order. Every sum has one order that depends on positions alone, so a row's result does not depend, bit for
 * bit, on what else is in the step, on how a prompt was cut into steps, or on the number of threads.
 *
 * Cache of a layer: [block][K/V head][K, V][16-token units of the block], each unit head_dim x 16 values:
 *   K unit: [head_dim / 2][16 tokens][2], pairs along head_dim: 64 bytes times a pair of the query give 16 scores.
 *   V unit: [head_dim / 16][8][16 dims][2], pairs along tokens. Where the block size allows it, two units are woven
 *   into one of 32 tokens, [head_dim / 16][16][16][2]. So 1 KB of either is one AMX tile.
 *
 * "Tiles" are operands of a product with 16 rows: 16 x 32 bfloat16 on the left, 16 x 16 float32 as the result.
 */
#include <math.h>
#include <omp.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "scratch.h"
#include "tiles.h"

enum {
    UNIT = 16,               /* tokens */
    STEP = 32,               /* tokens that one product of weights and values covers */
    CHUNK = 256,             /* tokens */
    CHUNK_UNITS = CHUNK / UNIT,
    CHUNK_STEPS = CHUNK / STEP,
    BLOCK_ROWS = 32,         /* rows that are computed together: two tiles */
    ITEM_ROWS = 128,         /* rows of an item at most, unless one token has more */
    SPLIT_ROWS = 32,         /* requests with at most so many rows are split over their chunks */
    STREAMS = 8,             /* units that memory is asked for at a time */
    LEFT_ROWS = 16,          /* of a tile that stands on the left of a product */
    LEFT_VALUES = 16 * 32,
    RESULT_VALUES = 16 * 16, /* of a tile of results */
    ODD_UNITS = CHUNK_UNITS / 2 * RESULT_VALUES, /* where scores of odd units lie, after those of even ones */
    TILE_BYTES = 1024,
    WRITE_TOKENS = 16,       /* tokens that a thread writes to the cache at a time */
};

/* Tokens that attend to chunks [first_chunk, end_chunk) of one request's context (or of contexts with equal blocks). */
typedef struct {
    int32_t request, first_token, num_tokens; /* tokens: a span of Plan.tokens */
    int32_t first_chunk, end_chunk;
    int32_t first_key, end_key;               /* positions that any of the tokens sees */
    int32_t is_split;                         /* one chunk of several: the results are parts, to be merged */
} Item;

/* A step as one KV group sees it. Mirrored in engine/attention/native.py; the caller fills the first four lines. */
typedef struct {
    int64_t num_requests, num_tokens, table_width, block_size, num_heads, num_kv_heads, head_dim, window;
    double scale;
    const int64_t *query_starts, *seq_lens, *block_tables, *slots;
    int32_t *memory;
    int64_t memory_size; /* int32 that memory must have */
    int64_t num_items, num_work, num_parts;
    Item *items;
    int32_t *tokens;                 /* token indices of the items */
    int32_t *positions;              /* (num_tokens) */
    int32_t *first_parts, *num_token_parts; /* (num_tokens) where a split token's parts are, ascending by chunk */
    int32_t *arrivals;               /* (num_tokens, num_kv_heads) parts that are there; the last one to come merges */
    int32_t *work;                   /* (num_work) item * num_kv_heads + head, in the order that threads take it */
} Plan;

/* ---- planning ------------------------------------------------------------------------------------------------ */

static int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* The first position that a token sees; window 0 means all before it. */
static int64_t first_seen(const Plan *plan, int64_t position) {
    return plan->window ? max_of(0, position - plan->window + 1) : 0;
}

static int64_t num_queries(const Plan *plan, int64_t request) {
    return plan->query_starts[request + 1] - plan->query_starts[request];
}

static bool is_split(const Plan *plan, int64_t request) {
    return num_queries(plan, request) * (plan->num_heads / plan->num_kv_heads) <= SPLIT_ROWS;
}

/* Say how many int32 the plan's memory must hold. */
void weft_size_attention_plan(Plan *plan) {
    int64_t items = 0, listed = 0;
    for (int64_t request = 0; request < plan->num_requests; request++) {
        int64_t queries = num_queries(plan, request), chunks = ceil_div(plan->seq_lens[request], CHUNK);
        items += is_split(plan, request) ? chunks * queries : queries;
        listed += is_split(plan, request) ? chunks * queries : queries;
    }
    int64_t item_values = sizeof(Item) / sizeof(int32_t) + plan->num_kv_heads;
    plan->memory_size = items * item_values + listed + plan->num_tokens * (3 + plan->num_kv_heads);
}

static Item *add_item(Plan *plan, int64_t request, int64_t first_chunk, int64_t end_chunk, bool split) {
    Item *item = &plan->items[plan->num_items++];
    Item *before = item - 1;
    *item = (Item){.request = (int32_t)request, .first_chunk = (int32_t)first_chunk, .end_chunk = (int32_t)end_chunk,
                   .first_key = INT32_MAX, .is_split = split};
    item->first_token = plan->num_items > 1 ? before->first_token + before->num_tokens : 0;
    return item;
}

/* Items must get their tokens before the next item is added. */
static void add_token(Plan *plan, Item *item, int64_t token) {
    int64_t position = plan->positions[token];
    plan->tokens[item->first_token + item->num_tokens++] = (int32_t)token;
    item->first_key = (int32_t)min_of(item->first_key, first_seen(plan, position));
    item->end_key = (int32_t)max_of(item->end_key, position + 1);
}

/* Requests of one chunk: `next` chains those of one bucket of the hash table, or those with equal blocks. */
typedef struct {
    int32_t next_in_bucket, next_alike, last_alike; /* -1 ends a chain; last_alike is -1 for all but the first */
} Link;

enum { BUCKETS = 1024 };

static bool reaches(const Plan *plan, int64_t request, int64_t chunk) {
    int64_t first_position = plan->seq_lens[request] - num_queries(plan, request);
    return chunk * CHUNK < plan->seq_lens[request] && chunk >= first_seen(plan, first_position) / CHUNK;
}

/* Whether two requests have the same blocks, filled as far, in a chunk. */
static bool are_alike(const Plan *plan, int64_t a, int64_t b, int64_t chunk) {
    int64_t end = min_of(plan->seq_lens[a], (chunk + 1) * CHUNK), first_block = chunk * CHUNK / plan->block_size;
    int64_t num_blocks = ceil_div(end, plan->block_size) - first_block;
    return end == min_of(plan->seq_lens[b], (chunk + 1) * CHUNK) &&
           !memcmp(plan->block_tables + a * plan->table_width + first_block,
                   plan->block_tables + b * plan->table_width + first_block, (size_t)num_blocks * sizeof(int64_t));
}

/* Link the requests that are split and reach the chunk. */
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

/* One chunk of all split requests; those with equal blocks share items, so that memory is read once for all of them. */
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
                              plan->positions[end - 1] / CHUNK + 1, false);
        for (int64_t token = begin; token < end; token++) add_token(plan, item, token);
    }
    /* Head by head: what one head's items read stays in the second-level cache. */
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

/* Decide once per step who computes what in every layer. The memory holds memory_size int32. */
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
    int64_t group = plan->num_heads / plan->num_kv_heads;
    /* Smaller items where the whole step would else be too few for the threads. */
    int64_t rows = min_of(max_of(num_rows / (4 * omp_get_max_threads()), BLOCK_ROWS), ITEM_ROWS);
    for (int64_t request = 0; request < plan->num_requests; request++)
        if (!is_split(plan, request)) plan_whole(plan, request, max_of(rows / group, 1));
    int64_t first_split = plan->num_items;
    for (int64_t chunk = 0; chunk < num_chunks; chunk++) plan_chunk(plan, chunk, max_of(ITEM_ROWS / group, 1), links);
    for (int64_t index = first_split * plan->num_kv_heads; index < plan->num_items * plan->num_kv_heads; index++)
        plan->work[plan->num_work++] = (int32_t)index;
}

/* ---- the cache ----------------------------------------------------------------------------------------------- */

/* Values between the start of a layer's cache and a unit of keys. */
static int64_t unit_offset(const Plan *plan, int64_t block, int64_t head, int64_t unit) {
    return ((block * plan->num_kv_heads + head) * 2 * plan->block_size + unit * UNIT) * plan->head_dim;
}

/* Values between a unit of keys and the unit of values for the same tokens. */
static int64_t values_offset(const Plan *plan) { return plan->block_size * plan->head_dim; }

static bool is_woven(const Plan *plan) { return plan->block_size % STEP == 0; }

static void write_key(const Plan *plan, bf16 *cache, int64_t slot, int64_t head, const bf16 *key) {
    int64_t unit = slot % plan->block_size / UNIT;
    bf16 *to = cache + unit_offset(plan, slot / plan->block_size, head, unit) + slot % UNIT * 2;
    for (int64_t pair = 0; pair < plan->head_dim / 2; pair++) memcpy(to + pair * 2 * UNIT, key + 2 * pair, 4);
}

static void write_value(const Plan *plan, bf16 *cache, int64_t slot, int64_t head, const bf16 *value) {
    int64_t tokens = is_woven(plan) ? STEP : UNIT, unit = slot % plan->block_size / tokens * (tokens / UNIT);
    bf16 *to = cache + unit_offset(plan, slot / plan->block_size, head, unit) + values_offset(plan);
    to += slot % tokens / 2 * 2 * LANES;
    const uint32_t shift = slot % 2 * 16, kept = 0xffff0000u >> shift;
    for (int64_t dim = 0; dim < plan->head_dim; dim += LANES, to += tokens * LANES)
        store_bits(to, (load_bits(to) & kept) | ((u32x16)load_bf16(value + dim) >> (16 - shift)));
}

/* The first token at or after `token` that does not share a pair of the V cache with the token before it. */
static int64_t pair_start(const Plan *plan, int64_t token) {
    bool is_second = token > 0 && token < plan->num_tokens && plan->slots[token] % 2 == 1;
    return is_second && plan->slots[token] == plan->slots[token - 1] + 1 ? token + 1 : token;
}

/* ---- products ------------------------------------------------------------------------------------------------ */

/* Units that memory is asked for while others are used, several side by side: memory serves that faster than one. */
typedef struct {
    const char *units[2 * CHUNK_UNITS];
    int64_t num_units, unit_bytes, unit, byte;
} Ahead;

/* Ask for 1 KB. */
INLINE void prefetch_next(Ahead *ahead) {
    if (!ahead || ahead->unit >= ahead->num_units) return;
    for (int stream = 0; stream < STREAMS; stream++)
        for (int line = 0; line < TILE_BYTES / STREAMS / 64; line++)
            __builtin_prefetch(ahead->units[ahead->unit + stream] + ahead->byte + 64 * line, 0, 2);
    ahead->byte += TILE_BYTES / STREAMS;
    if (ahead->byte < ahead->unit_bytes) return;
    ahead->byte = 0;
    ahead->unit += STREAMS;
}

/* One or two tiles of rows on the left, from left and left + second_left, each of `steps` operands side by side;
 * two columns of operands on the right; four results, two for each tile of rows, to and to + second_to. */
typedef struct {
    int64_t rows, steps;
    const bf16 *left;
    int64_t second_left;
    const char *right[2][CHUNK_STEPS];
    float *to;
    int64_t next_column, second_to;
} Product;

#if defined(__AMX_BF16__)

INLINE void multiply_tiles(const Product *product, int row_tiles, Ahead *ahead) {
    _tile_zero(0);
    _tile_zero(1);
    if (row_tiles > 1) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t step = 0; step < product->steps; step++) {
        const bf16 *left = product->left + step * LEFT_VALUES;
        prefetch_next(ahead);
        prefetch_next(ahead);
        _tile_loadd(4, left, 64);
        _tile_stream_loadd(6, product->right[0][step], 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_stream_loadd(7, product->right[1][step], 64);
        _tile_dpbf16ps(1, 4, 7);
        if (row_tiles > 1) {
            _tile_loadd(5, left + product->second_left, 64);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, product->to, 64);
    _tile_stored(1, product->to + product->next_column, 64);
    if (row_tiles > 1) {
        _tile_stored(2, product->to + product->second_to, 64);
        _tile_stored(3, product->to + product->second_to + product->next_column, 64);
    }
}

static void multiply(const Product *product, Ahead *ahead) {
    __asm__ volatile("" ::: "memory"); /* the compiler does not know that tiles are loaded from memory */
    if (product->rows > LEFT_ROWS)
        multiply_tiles(product, 2, ahead);
    else
        multiply_tiles(product, 1, ahead);
}

#else

INLINE void multiply_rows(const Product *product, const bf16 *left, float *to, int rows, Ahead *ahead) {
    f32x16 sums[4][2] = {0};
    for (int64_t step = 0; step < product->steps; step++, left += LEFT_VALUES) {
        prefetch_next(ahead);
        prefetch_next(ahead);
        const char *right[2] = {product->right[0][step], product->right[1][step]};
        for (int pair = 0; pair < 16; pair++) {
            u32x16 lines[2] = {load_bits(right[0] + 64 * pair), load_bits(right[1] + 64 * pair)};
            for (int row = 0; row < rows; row++) {
                uint32_t value;
                memcpy(&value, left + row * STEP + 2 * pair, sizeof value);
                sums[row][0] = dot_pairs(sums[row][0], splat_bits(value), lines[0]);
                sums[row][1] = dot_pairs(sums[row][1], splat_bits(value), lines[1]);
            }
        }
    }
    for (int row = 0; row < rows; row++) {
        store_f32(to + row * LANES, sums[row][0]);
        store_f32(to + product->next_column + row * LANES, sums[row][1]);
    }
}

static void multiply(const Product *product, Ahead *ahead) {
    for (int64_t row = 0; row < product->rows; row += 4) {
        const bf16 *left = product->left + row / 16 * product->second_left + row % 16 * STEP;
        float *to = product->to + row / 16 * product->second_to + row % 16 * LANES;
        switch (product->rows - row) {
            case 1: multiply_rows(product, left, to, 1, ahead); break;
            case 2: multiply_rows(product, left, to, 2, ahead); break;
            case 3: multiply_rows(product, left, to, 3, ahead); break;
            default: multiply_rows(product, left, to, 4, ahead);
        }
        ahead = NULL;
    }
}

#endif

/* ---- softmax ------------------------------------------------------------------------------------------------- */

/* 2 to the power of values <= 0, relative error below 3e-6, exactly 1 for 0. */
INLINE f32x16 power_of_two(f32x16 values) {
#if defined(__AVX512DQ__)
    f32x16 rest = (f32x16)_mm512_reduce_ps((__m512)values, 9); /* values - floor(values), 0 for -infinity */
#else
    i32x16 is_tiny = values < -126.0f;
    f32x16 clamped = (f32x16)(((i32x16)values & ~is_tiny) | ((i32x16)splat(-126.0f) & is_tiny));
    const f32x16 magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to a whole number */
    f32x16 whole = (clamped - 0.5f + magic) - magic, rest = clamped - whole;
#endif
    f32x16 power = splat(0.013426688f);
    power = power * rest + 0.052242469f;
    power = power * rest + 0.24128021f;
    power = power * rest + 0.69304484f;
    power = power * rest + 1.0f;
#if defined(__AVX512DQ__)
    return (f32x16)_mm512_scalef_ps((__m512)power, (__m512)values);
#else
    i32x16 exponent = (__builtin_convertvector(whole, i32x16) + 127) << 23;
    return (f32x16)((i32x16)(power * (f32x16)exponent) & ~is_tiny);
#endif
}

INLINE f32x16 larger(f32x16 a, f32x16 b) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_max_ps((__m512)a, (__m512)b);
#else
    i32x16 is_larger = a > b;
    return (f32x16)(((i32x16)a & is_larger) | ((i32x16)b & ~is_larger));
#endif
}

/* Round 32 values to bfloat16. */
INLINE void store_bf16_pair(bf16 *to, f32x16 low, f32x16 high) {
#if defined(__AVX512BF16__)
    store_bits(to, (u32x16)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
#else
    store_bf16(to, low);
    store_bf16(to + LANES, high);
#endif
}

/* Sum and maximum of the lanes, always in the same order. */
#define REDUCE(NAME, COMBINE)                                                                                          \
    INLINE float NAME(f32x16 values) {                                                                                 \
        values = COMBINE(values, __builtin_shuffle(values, (i32x16){8, 9, 10, 11, 12, 13, 14, 15, 0}));                \
        values = COMBINE(values, __builtin_shuffle(values, (i32x16){4, 5, 6, 7, 0}));                                  \
        values = COMBINE(values, __builtin_shuffle(values, (i32x16){2, 3, 0}));                                        \
        return COMBINE(values, __builtin_shuffle(values, (i32x16){1, 0}))[0];                                          \
    }
#define ADD(A, B) ((A) + (B))
REDUCE(sum_lanes, ADD)
REDUCE(largest_lane, larger)

/* What a row knows of a chunk, or of all chunks so far: maximum of the scaled scores, and the sum of their powers of
 * two relative to it. */
typedef struct {
    float maximum, sum;
} Mass;

/* Hide what a row does not see: positions of the chunk before `first` and from `last` on. */
static void mask_row(float *scores, int64_t first_unit, int64_t end_unit, int64_t first, int64_t last) {
    const i32x16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int64_t unit = first_unit; unit < end_unit; unit++) {
        int64_t start = unit * UNIT;
        if (start >= first && start + UNIT <= last) continue;
        i32x16 seen = (lanes >= (int32_t)(first - start)) & (lanes < (int32_t)(last - start));
        float *at = scores + unit % 2 * ODD_UNITS + unit / 2 * RESULT_VALUES;
        store_f32(at, (f32x16)(((i32x16)load_f32(at) & seen) | ((i32x16)splat(-INFINITY) & ~seen)));
    }
}

/* Where a row of a block lies in tiles of `values` each, of which a tile of rows has `tiles`. */
INLINE int64_t row_start(int64_t row, int64_t tiles, int64_t values) {
    return (row / LEFT_ROWS * tiles * LEFT_ROWS + row % LEFT_ROWS) * (values / LEFT_ROWS);
}

/* Turn the scores of a block of rows into weights (bfloat16), in the steps [first_step, end_step) of a chunk.
 *
 * All maxima come first: a row's exponentials wait for its maximum, and meanwhile the CPU can work on other rows. */
static void soften(const float *scores, bf16 *weights, int64_t rows, int64_t first_step, int64_t end_step, float scale,
                   Mass *masses) {
    for (int64_t row = 0; row < rows; row++) {
        const float *at = scores + row_start(row, CHUNK_UNITS, RESULT_VALUES);
        f32x16 highest = splat(-INFINITY);
        for (int64_t step = first_step; step < end_step; step++) {
            highest = larger(load_f32(at + step * RESULT_VALUES), highest);
            highest = larger(load_f32(at + ODD_UNITS + step * RESULT_VALUES), highest);
        }
        masses[row].maximum = largest_lane(highest) * scale;
    }
    for (int64_t row = 0; row < rows; row++) {
        const float *at = scores + row_start(row, CHUNK_UNITS, RESULT_VALUES), maximum = masses[row].maximum;
        bf16 *to = weights + row_start(row, CHUNK_STEPS, LEFT_VALUES);
        f32x16 sums = {0};
        for (int64_t step = first_step; step < end_step; step++) {
            f32x16 low = power_of_two(load_f32(at + step * RESULT_VALUES) * scale - maximum);
            f32x16 high = power_of_two(load_f32(at + ODD_UNITS + step * RESULT_VALUES) * scale - maximum);
            sums += low;
            sums += high;
            store_bf16_pair(to + step * LEFT_VALUES, low, high);
        }
        masses[row].sum = sum_lanes(sums);
    }
}

/* Add a chunk's result to what a row has of the chunks before it. The part's vectors lie part_stride values apart. */
static void merge(Mass *mass, float *result, Mass part, const float *values, int64_t part_stride, int64_t head_dim) {
    if (part.maximum == -INFINITY) return; /* the row sees nothing of the chunk */
    bool is_higher = part.maximum > mass->maximum;
    float lower = power_of_two(splat(-fabsf(part.maximum - mass->maximum)))[0];
    float kept = is_higher ? lower : 1.0f, added = is_higher ? 1.0f : lower;
    mass->maximum = is_higher ? part.maximum : mass->maximum;
    mass->sum = mass->sum * kept + part.sum * added;
    for (int64_t dim = 0; dim < head_dim; dim += LANES, values += part_stride)
        store_f32(result + dim, load_f32(result + dim) * kept + load_f32(values) * added);
}

/* ---- the work of a thread ------------------------------------------------------------------------------------ */

/* What a call shares between threads. Strides are between tokens and count values. */
typedef struct {
    const Plan *plan;
    bf16 *cache;
    const bf16 *queries, *keys, *values;
    int64_t query_stride, key_stride, value_stride;
    bf16 *outputs;
    float *parts; /* (num_parts, num_heads, part_values): result, maximum, sum */
} Call;

/* One chunk of an item for one K/V head. */
typedef struct {
    const Item *item; /* NULL when there is no work left */
    int64_t head, chunk, first_step, end_step, end_unit;
    const char *keys[CHUNK_UNITS], *values[CHUNK_UNITS]; /* from unit 2 * first_step on */
    const char *value_steps[CHUNK_STEPS];                /* where products find the values */
} Visit;

typedef struct {
    bf16 *queries;   /* (rows / 16, head_dim / 32) tiles */
    float *scores;   /* (2, CHUNK_UNITS) tiles */
    bf16 *weights;   /* (2, CHUNK_STEPS) tiles */
    bf16 *values;    /* (CHUNK_STEPS, head_dim / 16) tiles, for what cannot be used where it lies */
    float *part;     /* (2, head_dim / 16) tiles: a block of rows times one chunk */
    float *results;  /* (rows, head_dim) of the chunks so far */
    Mass *masses;    /* (rows) */
    int32_t *rows;   /* (rows, 2) first and last + 1 of the positions that a row sees */
} Worker;

static int64_t part_values(const Plan *plan) { return plan->head_dim + LANES; }

static int64_t item_rows(const Plan *plan) {
    return ceil_div(max_of(ITEM_ROWS, plan->num_heads / plan->num_kv_heads), BLOCK_ROWS) * BLOCK_ROWS;
}

/* Divide memory up; returns how many bytes that takes. */
static size_t lay_out(const Plan *plan, char *memory, Worker *worker) {
    const size_t rows = (size_t)item_rows(plan), dim = (size_t)plan->head_dim;
    char *at = memory;
#define TAKE(FIELD, VALUES) worker->FIELD = (void *)at, at += (VALUES) * sizeof *worker->FIELD
    TAKE(queries, rows * dim);
    TAKE(scores, BLOCK_ROWS * CHUNK);
    TAKE(weights, BLOCK_ROWS * CHUNK);
    TAKE(values, CHUNK * dim);
    TAKE(part, BLOCK_ROWS * dim);
    TAKE(results, rows * dim);
    TAKE(masses, rows);
    TAKE(rows, 2 * rows);
#undef TAKE
    return (size_t)(at - memory);
}

static int64_t group_size(const Plan *plan) { return plan->num_heads / plan->num_kv_heads; }

static int64_t row_token(const Plan *plan, const Item *item, int64_t row) {
    return plan->tokens[item->first_token + row / group_size(plan)];
}

/* The query head of a row, as an offset of values within its token. */
static int64_t row_offset(const Plan *plan, const Visit *visit, int64_t row) {
    return (visit->head * group_size(plan) + row % group_size(plan)) * plan->head_dim;
}

static int64_t num_rows(const Plan *plan, const Item *item) { return item->num_tokens * group_size(plan); }

/* Turn to a chunk: which of it is seen, and where that lies. */
static void look_up(const Call *call, Visit *visit) {
    const Plan *plan = call->plan;
    const Item *item = visit->item;
    const int64_t start = visit->chunk * CHUNK, *blocks = plan->block_tables + item->request * plan->table_width;
    visit->first_step = max_of(item->first_key - start, 0) / STEP;
    visit->end_unit = ceil_div(min_of(item->end_key - start, CHUNK), UNIT);
    visit->end_step = ceil_div(visit->end_unit, 2);
    for (int64_t unit = 2 * visit->first_step; unit < visit->end_unit; unit++) {
        int64_t position = start + unit * UNIT, block = blocks[position / plan->block_size];
        int64_t offset = unit_offset(plan, block, visit->head, position % plan->block_size / UNIT);
        visit->keys[unit] = (const char *)(call->cache + offset);
        visit->values[unit] = (const char *)(call->cache + offset + values_offset(plan));
    }
    if (visit->end_unit % 2) visit->keys[visit->end_unit] = visit->keys[visit->end_unit - 1]; /* its scores are hidden */
}

static atomic_llong next_work;

/* The visit after this one: the item's next chunk, or the first of the item that comes up next. */
static Visit next_visit(const Call *call, const Visit *visit) {
    const Plan *plan = call->plan;
    Visit next = {.item = visit->item, .head = visit->head, .chunk = visit->chunk + 1};
    if (!next.item || next.chunk == next.item->end_chunk) {
        int64_t index = atomic_fetch_add(&next_work, 1);
        if (index >= plan->num_work) return (Visit){.item = NULL};
        next.item = &plan->items[plan->work[index] / plan->num_kv_heads];
        next.head = plan->work[index] % plan->num_kv_heads;
        next.chunk = next.item->first_chunk;
    }
    look_up(call, &next);
    return next;
}

/* While a chunk is computed, memory is asked for the next one's keys and values. */
static void look_ahead(const Plan *plan, const Visit *next, Ahead *ahead) {
    *ahead = (Ahead){.unit_bytes = plan->head_dim * UNIT * (int64_t)sizeof(bf16)};
    if (!next->item) return;
    for (int64_t unit = 2 * next->first_step; unit < next->end_unit; unit++) {
        ahead->units[ahead->num_units++] = next->keys[unit];
        ahead->units[ahead->num_units++] = next->values[unit];
    }
    /* Asking twice costs nothing. */
    for (int64_t unit = ahead->num_units; unit % STREAMS; unit++) ahead->units[unit] = ahead->units[0];
}

static void open_item(const Call *call, Worker *worker, const Visit *visit) {
    const Plan *plan = call->plan;
    const int64_t rows = num_rows(plan, visit->item), dim = plan->head_dim;
    for (int64_t row = 0; row < ceil_div(rows, LEFT_ROWS) * LEFT_ROWS; row++) {
        bf16 *to = worker->queries + row / LEFT_ROWS * LEFT_ROWS * dim + row % LEFT_ROWS * STEP;
        if (row >= rows) {
            for (int64_t at = 0; at < dim; at += STEP) memset(to + at * LEFT_ROWS, 0, STEP * sizeof(bf16));
            continue;
        }
        int64_t token = row_token(plan, visit->item, row), position = plan->positions[token];
        const bf16 *query = call->queries + token * call->query_stride + row_offset(plan, visit, row);
        for (int64_t at = 0; at < dim; at += STEP) memcpy(to + at * LEFT_ROWS, query + at, STEP * sizeof(bf16));
        worker->rows[2 * row] = (int32_t)first_seen(plan, position);
        worker->rows[2 * row + 1] = (int32_t)position + 1;
        worker->masses[row] = (Mass){-INFINITY, 0};
    }
    memset(worker->results, 0, (size_t)(rows * dim) * sizeof(float));
}

/* Copy a step of values as one of 32 tokens, zeros where nothing was written yet: zero weights would not hide
 * not-a-numbers there. */
static void stage_step(const Plan *plan, const char *const *units, int64_t num_units, int64_t num_tokens, bf16 *to) {
    const int64_t half = is_woven(plan) ? TILE_BYTES : TILE_BYTES / 2;
    for (int64_t dim = 0; dim < plan->head_dim; dim += LANES) {
        char *tile = (char *)(to + dim * STEP);
        const int64_t at = dim / LANES * half;
        for (int64_t byte = 0; byte < half; byte += 64) store_bits(tile + byte, load_bits(units[0] + at + byte));
        for (int64_t byte = 0; byte < half && !is_woven(plan) && num_units > 1; byte += 64)
            store_bits(tile + half + byte, load_bits(units[1] + at + byte));
        for (int64_t pair = num_tokens / 2; pair < STEP / 2; pair++) {
            u32x16 kept = splat_bits(pair == num_tokens / 2 && num_tokens % 2 ? 0xffffu : 0);
            store_bits(tile + 64 * pair, load_bits(tile + 64 * pair) & kept);
        }
    }
}

static void stage_values(const Plan *plan, Worker *worker, Visit *visit, Ahead *ahead) {
    int64_t written = plan->seq_lens[visit->item->request] - visit->chunk * CHUNK;
    if (!is_woven(plan)) written = min_of(written, visit->end_unit * UNIT); /* the second unit of a step may lack */
    for (int64_t step = visit->first_step; step < visit->end_step; step++) {
        visit->value_steps[step] = visit->values[2 * step];
        if (is_woven(plan) && (step + 1) * STEP <= written) continue;
        bf16 *staged = worker->values + step * STEP * plan->head_dim;
        for (int64_t dim = 0; dim < plan->head_dim; dim += STEP) prefetch_next(ahead);
        stage_step(plan, visit->values + 2 * step, visit->end_unit - 2 * step, min_of(written - step * STEP, STEP), staged);
        visit->value_steps[step] = (const char *)staged;
    }
}

static void score(const Plan *plan, Worker *worker, const Visit *visit, int64_t row, Product *product, Ahead *ahead) {
    product->steps = plan->head_dim / STEP;
    product->left = worker->queries + row * plan->head_dim;
    product->second_left = LEFT_ROWS * plan->head_dim;
    product->next_column = ODD_UNITS;
    product->second_to = CHUNK * LEFT_ROWS;
    for (int64_t unit = 2 * visit->first_step; unit < 2 * visit->end_step; unit += 2) {
        for (int64_t step = 0; step < product->steps; step++) {
            product->right[0][step] = visit->keys[unit] + step * TILE_BYTES;
            product->right[1][step] = visit->keys[unit + 1] + step * TILE_BYTES;
        }
        product->to = worker->scores + unit / 2 * RESULT_VALUES;
        multiply(product, ahead);
    }
}

static void weigh(const Plan *plan, Worker *worker, const Visit *visit, Product *product, Ahead *ahead) {
    product->steps = visit->end_step - visit->first_step;
    product->left = worker->weights + visit->first_step * LEFT_VALUES;
    product->second_left = CHUNK * LEFT_ROWS;
    product->next_column = RESULT_VALUES;
    product->second_to = LEFT_ROWS * plan->head_dim;
    for (int64_t dim = 0; dim < plan->head_dim; dim += 2 * LANES) {
        for (int64_t step = 0; step < product->steps; step++) {
            product->right[0][step] = visit->value_steps[visit->first_step + step] + dim / LANES * TILE_BYTES;
            product->right[1][step] = product->right[0][step] + TILE_BYTES;
        }
        product->to = worker->part + dim * LEFT_ROWS;
        multiply(product, ahead);
    }
}

/* The results of a block of rows for a chunk: merged into the item's, or put aside until those of all chunks are there. */
static void keep(const Call *call, Worker *worker, const Visit *visit, int64_t row, int64_t rows, const Mass *masses) {
    const Plan *plan = call->plan;
    const int64_t dim = plan->head_dim;
    for (int64_t r = 0; r < rows; r++) {
        const float *values = worker->part + r / LEFT_ROWS * LEFT_ROWS * dim + r % LEFT_ROWS * LANES;
        if (!visit->item->is_split) {
            merge(&worker->masses[row + r], worker->results + (row + r) * dim, masses[r], values, RESULT_VALUES, dim);
            continue;
        }
        int64_t token = row_token(plan, visit->item, row + r);
        int64_t part = plan->first_parts[token] + visit->chunk - worker->rows[2 * (row + r)] / CHUNK;
        float *to = call->parts + part * plan->num_heads * part_values(plan);
        to += row_offset(plan, visit, row + r) / dim * part_values(plan);
        for (int64_t at = 0; at < dim; at += LANES) store_f32(to + at, load_f32(values + at * LANES));
        memcpy(to + dim, &masses[r], sizeof(Mass));
    }
}

static void compute_block(const Call *call, Worker *worker, Visit *visit, int64_t row, int64_t rows, Ahead *ahead) {
    const Plan *plan = call->plan;
    const int64_t start = visit->chunk * CHUNK;
    const int32_t *seen = worker->rows + 2 * row;
    int64_t first = CHUNK, last = 0;
    for (int64_t r = 0; r < rows; r++) {
        first = min_of(first, max_of(seen[2 * r] - start, 0));
        last = max_of(last, min_of(seen[2 * r + 1] - start, CHUNK));
    }
    if (first >= last) return;
    Visit part = *visit;
    part.first_step = first / STEP;
    part.end_step = ceil_div(last, STEP);
    Product product = {.rows = rows};
    score(plan, worker, &part, row, &product, ahead);
    if (!visit->value_steps[visit->first_step]) stage_values(plan, worker, visit, ahead);
    memcpy(part.value_steps, visit->value_steps, sizeof part.value_steps);
    for (int64_t r = 0; r < rows; r++)
        mask_row(worker->scores + row_start(r, CHUNK_UNITS, RESULT_VALUES), 2 * part.first_step, 2 * part.end_step,
                 seen[2 * r] - start, seen[2 * r + 1] - start);
    Mass masses[BLOCK_ROWS];
    const float scale = (float)(plan->scale * 1.4426950408889634); /* exponentials are powers of two */
    soften(worker->scores, worker->weights, rows, part.first_step, part.end_step, scale, masses);
    weigh(plan, worker, &part, &product, ahead);
    keep(call, worker, visit, row, rows, masses);
}

static void write_output(const Call *call, int64_t token, int64_t offset, const float *result, float sum) {
    bf16 *to = call->outputs + token * call->plan->num_heads * call->plan->head_dim + offset;
    for (int64_t dim = 0; dim < call->plan->head_dim; dim += LANES)
        store_bf16(to + dim, load_f32(result + dim) * (1.0f / sum));
}

/* Merge what all chunks gave for one token and K/V head; worker->results is free to use. */
static void merge_parts(const Call *call, Worker *worker, const Visit *visit, int64_t row) {
    const Plan *plan = call->plan;
    const int64_t dim = plan->head_dim, token = row_token(plan, visit->item, row);
    for (int64_t end = row + group_size(plan); row < end; row++) {
        Mass mass = {-INFINITY, 0}, added;
        memset(worker->results, 0, (size_t)dim * sizeof(float));
        for (int64_t part = 0; part < plan->num_token_parts[token]; part++) {
            const float *from = call->parts + (plan->first_parts[token] + part) * plan->num_heads * part_values(plan);
            from += row_offset(plan, visit, row) / dim * part_values(plan);
            memcpy(&added, from + dim, sizeof added);
            merge(&mass, worker->results, added, from, LANES, dim);
        }
        write_output(call, token, row_offset(plan, visit, row), worker->results, mass.sum);
    }
}

static void close_item(const Call *call, Worker *worker, const Visit *visit) {
    const Plan *plan = call->plan;
    const int64_t rows = num_rows(plan, visit->item);
    if (visit->item->is_split) {
        for (int64_t row = 0; row < rows; row += group_size(plan)) {
            int64_t token = row_token(plan, visit->item, row);
            int32_t *arrivals = &plan->arrivals[token * plan->num_kv_heads + visit->head];
            /* They count on from layer to layer. */
            int32_t arrived = __atomic_add_fetch(arrivals, 1, __ATOMIC_ACQ_REL);
            if (arrived % plan->num_token_parts[token] == 0) merge_parts(call, worker, visit, row);
        }
        return;
    }
    for (int64_t row = 0; row < rows; row++)
        write_output(call, row_token(plan, visit->item, row), row_offset(plan, visit, row),
                     worker->results + row * plan->head_dim, worker->masses[row].sum);
}

/* ---- the call ------------------------------------------------------------------------------------------------ */

static void write_cache(const Call *call) {
    const Plan *plan = call->plan;
    const int64_t *slots = plan->slots, pieces = ceil_div(plan->num_tokens, WRITE_TOKENS);
#pragma omp for schedule(static)
    for (int64_t index = 0; index < pieces * plan->num_kv_heads; index++) {
        int64_t head = index / pieces, piece = index % pieces, offset = head * plan->head_dim;
        int64_t end = pair_start(plan, min_of((piece + 1) * WRITE_TOKENS, plan->num_tokens));
        for (int64_t token = pair_start(plan, piece * WRITE_TOKENS); token < end; token++) {
            write_key(plan, call->cache, slots[token], head, call->keys + token * call->key_stride + offset);
            write_value(plan, call->cache, slots[token], head, call->values + token * call->value_stride + offset);
        }
    }
}

static void run_worker(const Call *call, Worker *worker) {
    Visit visit = next_visit(call, &(Visit){.item = NULL});
    Ahead ahead;
    look_ahead(call->plan, &visit, &ahead);
    while (ahead.unit < ahead.num_units) prefetch_next(&ahead);
    while (visit.item) {
        Visit next = next_visit(call, &visit);
        look_ahead(call->plan, &next, &ahead);
        if (visit.chunk == visit.item->first_chunk) open_item(call, worker, &visit);
        const int64_t rows = num_rows(call->plan, visit.item);
        for (int64_t row = 0; row < rows; row += BLOCK_ROWS)
            compute_block(call, worker, &visit, row, min_of(rows - row, BLOCK_ROWS), &ahead);
        while (ahead.unit < ahead.num_units) prefetch_next(&ahead);
        if (visit.chunk + 1 == visit.item->end_chunk) close_item(call, worker, &visit);
        visit = next;
    }
}

/* Write this step's keys and values (num_tokens, num_kv_heads, head_dim) of one layer to its cache, then attend with
 * queries (num_tokens, num_heads, head_dim) into outputs of that shape, contiguous. Strides are between tokens. */
void weft_attend(const Plan *plan, bf16 *cache, const bf16 *queries, int64_t query_stride,
                 const bf16 *keys, int64_t key_stride, const bf16 *values, int64_t value_stride, bf16 *outputs) {
    static Scratch worker_scratch, part_scratch;
    Worker sizes;
    const size_t worker_bytes = (lay_out(plan, NULL, &sizes) + 4095) & ~(size_t)4095;
    char *memory = scratch_reserve(&worker_scratch, worker_bytes * (size_t)omp_get_max_threads());
    size_t part_bytes = (size_t)(plan->num_parts * plan->num_heads * part_values(plan)) * sizeof(float);
    const Call call = {.plan = plan, .cache = cache, .queries = queries,
                       .keys = keys, .values = values, .query_stride = query_stride, .key_stride = key_stride,
                       .value_stride = value_stride, .outputs = outputs,
                       .parts = scratch_reserve(&part_scratch, part_bytes)};
    atomic_store(&next_work, 0);
#pragma omp parallel
    {
        Worker worker;
        lay_out(plan, memory + worker_bytes * (size_t)omp_get_thread_num(), &worker);
        write_cache(&call); /* ends with a barrier */
        open_tiles();
        run_worker(&call, &worker);
        close_tiles();
    }
}
