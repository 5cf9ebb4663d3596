/* Paged attention over a cache in bfloat16 or int8, for decodes and prefill chunks in one call.
 *
 * The context of a request is cut at fixed positions into chunks. A row is one query head of one token. For each row and
 * chunk the kernel computes scores, their maximum, exponentials, their sum, and the weighted sum of values. It then
 * merges the chunks of a row in ascending order. The order of every sum depends on positions alone. So the bits of a
 * row's result do not depend on the rest of the step, on how a prompt was cut into steps, or on the number of threads.
 *
 * Cache of a layer: [block][K/V head][K, V][16-token units of the block], each unit head_dim x 16 values:
 *   K unit: [head_dim / 2][16 tokens][2], pairs along head_dim: 64 bytes times a pair of the query give 16 scores.
 *   V unit: [head_dim / 16][8][16 dims][2], pairs along tokens. If the block size is a multiple of 32, two units are
 *   woven into one of 32 tokens, [head_dim / 16][16][16][2]. So 1 KB of K or of V is one AMX tile.
 *
 * In int8, a token's K and V of a head have a scale each, which follow behind the block's V in float32. Units are
 *   K: [head_dim][16 tokens], V: [head_dim / 16][16 tokens][16 dims], woven likewise. They are widened to bfloat16,
 *   without the scales. Scores are multiplied by the scales of K, weights by those of V.
 *
 * Latents (DeepSeek-AI, 2024, section 2.1) have only K units; their first value_dim values are also the values, for all
 * heads. A chunk's values are made of its keys, once for all heads, while they are in the second-level cache.
 *
 * A tile is an operand of a product with 16 rows: 16 x 32 inputs on the left, 16 x 16 float32 as the result.
 */
#include <stdatomic.h>

#include "attention.h"
#include "kernels.h"
#include "pool.h"
#include "vectors.h"

enum { WRITE_TOKENS = 16 }; /* tokens that a thread writes to the cache in one piece of work */

/* ---- the work of a thread ------------------------------------------------------------------------------------ */

/* What the threads of a call share. Strides are from token to token, in values. */
typedef struct {
    const Plan *plan;
    char *cache;
    const bf16 *queries, *keys, *values;
    int64_t query_stride, key_stride, value_stride, bias_reach;
    const float *sinks; /* (num_heads), or NULL */
    const float *bias;  /* (num_heads, 2 * bias_reach), or NULL: column bias_reach + key's position - query's */
    bf16 *outputs;
    float *parts; /* (num_parts, num_heads, part_values): result, maximum, sum */
    char *memory; /* worker_bytes per thread */
    size_t worker_bytes;
} Call;

/* One chunk of an item for one K/V head. */
typedef struct {
    const Item *item; /* NULL if no work is left */
    int64_t head, chunk, first_step, end_step, end_unit;
    const char *keys[CHUNK_UNITS], *values[CHUNK_UNITS]; /* from unit 2 * first_step on */
    const char *value_steps[CHUNK_STEPS];                /* where products read the values */
    const char *scales[CHUNK_UNITS];                     /* those of keys, of a rounded cache */
} Visit;

typedef struct {
    Input *queries;  /* (rows / 16, head_dim / 32) tiles */
    float *scores;   /* (2, CHUNK_UNITS) tiles */
    Input *weights;  /* (2, CHUNK_STEPS) tiles */
    bf16 *values;    /* (CHUNK_STEPS, value_dim / 16) tiles: copies of values that products cannot read in place */
    bf16 *keys;      /* (CHUNK_UNITS, head_dim / 32) tiles, of a rounded cache */
    float *scales;   /* (2, CHUNK) of keys and values, likewise */
    float *part;     /* (2, value_dim / 16) tiles: a block of rows times one chunk */
    float *results;  /* (rows, value_dim) of the chunks so far */
    Mass *masses;    /* (rows) */
    int32_t *rows;   /* (rows, 2) the first position that a row sees, and the last + 1 */
} Worker;

static int64_t item_rows(const Plan *plan) {
    return ceil_div(max_of(ITEM_ROWS, plan->num_heads / plan->num_kv_heads), BLOCK_ROWS) * BLOCK_ROWS;
}

/* Lay the arrays of a worker out in memory; returns the number of bytes. */
static size_t lay_out(const Plan *plan, char *memory, Worker *worker) {
    const size_t rows = (size_t)item_rows(plan), dim = (size_t)plan->value_dim;
    char *at = memory;
#define TAKE(FIELD, VALUES) worker->FIELD = (void *)at, at += (VALUES) * sizeof *worker->FIELD
    TAKE(queries, rows * (size_t)plan->head_dim);
    TAKE(scores, BLOCK_ROWS * CHUNK);
    TAKE(weights, BLOCK_ROWS * CHUNK);
    TAKE(values, CHUNK * dim);
    TAKE(keys, plan->is_rounded ? CHUNK * (size_t)plan->head_dim : 0);
    TAKE(scales, plan->is_rounded ? 2 * CHUNK : 0);
    TAKE(part, BLOCK_ROWS * dim);
    TAKE(results, rows * dim);
    TAKE(masses, rows);
    TAKE(rows, 2 * rows);
#undef TAKE
    return (size_t)(at - memory);
}

static int64_t row_token(const Plan *plan, const Item *item, int64_t row) {
    return plan->tokens[item->first_token + row / group_size(plan)];
}

/* Index of a row's query head. */
static int64_t row_head(const Plan *plan, const Visit *visit, int64_t row) {
    return visit->head * group_size(plan) + row % group_size(plan);
}

static int64_t num_rows(const Plan *plan, const Item *item) { return item->num_tokens * group_size(plan); }

/* Find the visible part of a chunk and its addresses. */
static void look_up(const Call *call, Visit *visit) {
    const Plan *plan = call->plan;
    const Item *item = visit->item;
    const int64_t start = visit->chunk * CHUNK, *blocks = plan->block_tables + item->request * plan->table_width;
    visit->first_step = max_of(item->first_key - start, 0) / STEP;
    visit->end_unit = ceil_div(min_of(item->end_key - start, CHUNK), UNIT);
    visit->end_step = ceil_div(visit->end_unit, 2);
    for (int64_t unit = 2 * visit->first_step; unit < visit->end_unit; unit++) {
        int64_t position = start + unit * UNIT, index = position % plan->block_size / UNIT;
        const char *keys = call->cache + keys_offset(plan, blocks[position / plan->block_size], visit->head);
        visit->keys[unit] = keys + index * unit_bytes(plan);
        visit->values[unit] = visit->keys[unit] + values_offset(plan);
        visit->scales[unit] = keys + scales_offset(plan) + index * UNIT * (int64_t)sizeof(float);
    }
    if (visit->end_unit % 2) visit->keys[visit->end_unit] = visit->keys[visit->end_unit - 1]; /* scores will be masked */
}

static atomic_llong next_work;

/* The next visit: the item's next chunk, or the first chunk of the next item. */
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

/* List the next chunk's keys and values, to prefetch while this chunk is computed. */
static void look_ahead(const Plan *plan, const Visit *next, Ahead *ahead) {
    *ahead = (Ahead){.unit_bytes = unit_bytes(plan)};
    if (!next->item) return;
    for (int64_t unit = 2 * next->first_step; unit < next->end_unit; unit++) {
        ahead->units[ahead->num_units++] = next->keys[unit];
        if (!plan->is_latent) ahead->units[ahead->num_units++] = next->values[unit];
        if (!plan->is_rounded) continue;
        __builtin_prefetch(next->scales[unit], 0, 2);
        __builtin_prefetch(next->scales[unit] + scale_bytes(plan), 0, 2);
    }
    /* Fill up the last group; prefetching twice costs nothing. */
    for (int64_t unit = ahead->num_units; unit % STREAMS; unit++) ahead->units[unit] = ahead->units[0];
}

static void open_item(const Call *call, Worker *worker, const Visit *visit) {
    const Plan *plan = call->plan;
    const int64_t rows = num_rows(plan, visit->item), dim = plan->head_dim;
    for (int64_t row = 0; row < ceil_div(rows, LEFT_ROWS) * LEFT_ROWS; row++) {
        Input *to = worker->queries + row / LEFT_ROWS * LEFT_ROWS * dim + row % LEFT_ROWS * STEP;
        if (row >= rows) {
            for (int64_t at = 0; at < dim; at += STEP) memset(to + at * LEFT_ROWS, 0, STEP * sizeof(Input));
            continue;
        }
        int64_t token = row_token(plan, visit->item, row), position = plan->positions[token];
        const bf16 *query = call->queries + token * call->query_stride + row_head(plan, visit, row) * dim;
        for (int64_t at = 0; at < dim; at += STEP) copy_inputs(to + at * LEFT_ROWS, query + at, STEP);
        worker->rows[2 * row] = (int32_t)first_seen(plan, position);
        worker->rows[2 * row + 1] = (int32_t)end_seen(plan, visit->item->request, position);
        worker->masses[row] = (Mass){-INFINITY, 0};
    }
    memset(worker->results, 0, (size_t)(rows * plan->value_dim) * sizeof(float));
}

/* Copy a step of values as one of 32 tokens. Tokens that were not written yet become zeros: their memory may hold NaN,
 * which a zero weight would not hide. */
static void stage_step(const Plan *plan, const char *const *units, int64_t num_units, int64_t num_tokens, bf16 *to) {
    const int64_t half = is_woven(plan) ? TILE_BYTES : TILE_BYTES / 2;
    for (int64_t dim = 0; dim < plan->value_dim; dim += LANES) {
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

/* The same from keys: a step of latents. Keys are pairs along dims, values pairs along tokens. So each 2 x 2 values of two
 * tokens change places within 64 bits, and these are then transposed: from dims x tokens to tokens x dims. Loops are
 * unrolled, because GCC keeps lines in memory that a loop indexes. */
static void stage_latents(const Plan *plan, const char *const *units, int64_t num_units, int64_t num_tokens, bf16 *to) {
    for (int64_t unit = 0; unit < 2; unit++) {
        const int64_t written = max_of(min_of(unit < num_units ? num_tokens - unit * UNIT : 0, UNIT), 0);
        for (int64_t dim = 0; dim < plan->value_dim; dim += LANES) {
            char *tile = (char *)(to + dim * STEP) + unit * TILE_BYTES / 2;
            if (written) {
                const char *from = units[unit] + dim * 2 * UNIT;
                u32x16 lines[UNIT / 2]; /* in the end two tokens each, of LANES dims */
#pragma GCC unroll 8
                for (int pair = 0; pair < UNIT / 2; pair++) lines[pair] = swap_inner(load_bits(from + 64 * pair));
                transpose_wide(lines);
#pragma GCC unroll 8
                for (int pair = 0; pair < UNIT / 2; pair++) store_bits(tile + 64 * pair, lines[pair]);
            }
            for (int64_t token = written; token < UNIT; token++) {
                char *line = tile + token / 2 * 64;
                store_bits(line, token % 2 ? load_bits(line) & 0xffffu : (u32x16){0});
            }
        }
    }
}

static bool are_few_rows(const Plan *plan, const Item *item) { return num_rows(plan, item) <= MOST_WIDENED_ROWS; }

/* The line of two tokens with which a unit's values begin, and the bytes from there to the next 16 dims. */
static const char *rounded_values(const Plan *plan, const Visit *visit, int64_t unit, int64_t *stride) {
    *stride = (is_woven(plan) ? STEP : UNIT) * LANES;
    return is_woven(plan) ? visit->values[unit - unit % 2] + unit % 2 * UNIT * LANES : visit->values[unit];
}

/* Copy the scales of a rounded chunk, without those of tokens that were not written yet: what stands there instead of
 * values is finite, and their weights are zero. For many rows, make tiles of bfloat16, once for all; for few, tiles of
 * int8 of values whose tokens lie in two blocks. */
static void stage_rounded(const Plan *plan, Worker *worker, Visit *visit, Ahead *ahead) {
    const int64_t written = plan->seq_lens[visit->item->request] - visit->chunk * CHUNK, dims = plan->head_dim;
    const bool few = are_few_rows(plan, visit->item);
    for (int64_t unit = 2 * visit->first_step; unit < 2 * visit->end_step; unit++) {
        const int64_t source = min_of(unit, visit->end_unit - 1); /* a last step may have no second unit */
        for (int64_t side = 0; side < 2; side++) {
            float *scales = worker->scales + side * CHUNK + unit * UNIT;
            memcpy(scales, visit->scales[source] + side * scale_bytes(plan), UNIT * sizeof(float));
            for (int64_t token = max_of(written - unit * UNIT, 0); token < UNIT; token++) scales[token] = 0;
        }
        if (few && is_woven(plan)) {
            if (unit % 2 == 0) visit->value_steps[unit / 2] = visit->values[unit];
            continue;
        }
        int64_t stride;
        const char *keys = visit->keys[unit], *values = rounded_values(plan, visit, source, &stride);
        char *to = (char *)(worker->values + unit / 2 * STEP * dims);
        if (unit % 2 == 0) visit->value_steps[unit / 2] = to;
        if (few) {
            for (int64_t dim = 0; dim < dims; dim += LANES)
                memcpy(to + dim * STEP + unit % 2 * UNIT * LANES, values + dim / LANES * stride, UNIT * LANES);
            continue;
        }
        for (int64_t dim = 0; dim < dims; dim += LANES)
            for (int pair = 0; pair < UNIT / 2; pair++)
                store_bits(to + dim / LANES * TILE_BYTES + (unit % 2 * UNIT / 2 + pair) * 64,
                           pairs_of_lines(values + dim / LANES * stride + pair * 2 * LANES));
        visit->keys[unit] = to = (char *)(worker->keys + source * UNIT * dims);
        for (int64_t dim = 0; unit == source && dim < dims; dim += 2, to += 64) {
            if (dim % STEP == 0) prefetch_next(ahead);
            store_bits(to, pairs_of_lines(keys + dim * UNIT));
        }
    }
}

static void stage_values(const Plan *plan, Worker *worker, Visit *visit, Ahead *ahead) {
    int64_t written = plan->seq_lens[visit->item->request] - visit->chunk * CHUNK;
    if (!is_woven(plan)) written = min_of(written, visit->end_unit * UNIT); /* a step may have no second unit */
    for (int64_t step = visit->first_step; step < visit->end_step; step++) {
        visit->value_steps[step] = visit->values[2 * step];
        if (!plan->is_latent && is_woven(plan) && (step + 1) * STEP <= written) continue;
        bf16 *staged = worker->values + step * STEP * plan->value_dim;
        for (int64_t dim = 0; dim < plan->value_dim; dim += STEP) prefetch_next(ahead);
        (plan->is_latent ? stage_latents : stage_step)(plan, visit->values + 2 * step, visit->end_unit - 2 * step,
                                                       min_of(written - step * STEP, STEP), staged);
        visit->value_steps[step] = (const char *)staged;
    }
}

static void score(const Plan *plan, Worker *worker, const Visit *visit, int64_t row, Product *product, Ahead *ahead) {
    const int64_t tile_bytes = product->is_rounded ? TILE_BYTES / 2 : TILE_BYTES;
    product->steps = plan->head_dim / STEP;
    product->left = worker->queries + row * plan->head_dim;
    product->second_left = LEFT_ROWS * plan->head_dim;
    product->next_column = ODD_UNITS;
    product->second_to = CHUNK * LEFT_ROWS;
    for (int64_t unit = 2 * visit->first_step; unit < 2 * visit->end_step; unit += 2) {
        for (int64_t step = 0; step < product->steps; step++) {
            product->right[0][step] = visit->keys[unit] + step * tile_bytes;
            product->right[1][step] = visit->keys[unit + 1] + step * tile_bytes;
        }
        product->to = worker->scores + unit / 2 * RESULT_VALUES;
        multiply(product, ahead);
    }
}

static void weigh(const Plan *plan, Worker *worker, const Visit *visit, Product *product, Ahead *ahead) {
    const int64_t tile_bytes = product->is_rounded ? TILE_BYTES / 2 : TILE_BYTES;
    product->steps = visit->end_step - visit->first_step;
    product->left = worker->weights + visit->first_step * LEFT_VALUES;
    product->second_left = CHUNK * LEFT_ROWS;
    product->next_column = RESULT_VALUES;
    product->second_to = LEFT_ROWS * plan->value_dim;
    for (int64_t dim = 0; dim < plan->value_dim; dim += 2 * LANES) {
        for (int64_t step = 0; step < product->steps; step++) {
            product->right[0][step] = visit->value_steps[visit->first_step + step] + dim / LANES * tile_bytes;
            product->right[1][step] = product->right[0][step] + tile_bytes;
        }
        product->to = worker->part + dim * LEFT_ROWS;
        multiply(product, ahead);
    }
}

/* Merge the results of a block of rows for a chunk into the item's; if the item is split, store them as parts. */
static void keep(const Call *call, Worker *worker, const Visit *visit, int64_t row, int64_t rows, const Mass *masses) {
    const Plan *plan = call->plan;
    const int64_t dim = plan->value_dim;
    for (int64_t r = 0; r < rows; r++) {
        const float *values = worker->part + r / LEFT_ROWS * LEFT_ROWS * dim + r % LEFT_ROWS * LANES;
        if (!visit->item->is_split) {
            merge(&worker->masses[row + r], worker->results + (row + r) * dim, masses[r], values, RESULT_VALUES, dim);
            continue;
        }
        int64_t token = row_token(plan, visit->item, row + r);
        int64_t part = plan->first_parts[token] + visit->chunk - worker->rows[2 * (row + r)] / CHUNK;
        float *to = call->parts + part * plan->num_heads * part_values(plan);
        to += row_head(plan, visit, row + r) * part_values(plan);
        for (int64_t at = 0; at < dim; at += LANES) store_f32(to + at, load_f32(values + at * LANES));
        memcpy(to + dim, &masses[r], sizeof(Mass));
    }
}

/* Bend and bias the products of a block of rows, if the layer does so; returns the factor that they still need. Maxima
 * and scores are multiplied by log2(e), since exponentials are powers of two. */
static float shape_scores(const Call *call, Worker *worker, const Visit *part, int64_t row, int64_t rows) {
    const Plan *plan = call->plan;
    Shape shape = {.scale = (float)(plan->scale * LOG2_E), .cap = (float)(plan->soft_cap * LOG2_E)};
    if (!plan->slopes && !call->bias && shape.cap == 0) return shape.scale;
    for (int64_t r = 0; r < rows; r++) {
        int64_t head = row_head(plan, part, row + r);
        int64_t position = worker->rows[2 * (row + r) + 1] - 1;
        if (plan->slopes) shape.slope = plan->slopes[head] * (float)LOG2_E;
        if (call->bias) shape.bias = call->bias + (2 * head + 1) * call->bias_reach;
        shape_row(worker->scores + row_start(r, CHUNK_UNITS, RESULT_VALUES), 2 * part->first_step, 2 * part->end_step,
                  shape, part->chunk * CHUNK - position);
    }
    return 1;
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
    Product product = {.rows = rows, .is_rounded = plan->is_rounded && are_few_rows(plan, visit->item)};
    const bool is_staged = visit->value_steps[visit->first_step];
    if (plan->is_rounded && !is_staged) stage_rounded(plan, worker, visit, ahead);
    memcpy(part.keys, visit->keys, sizeof part.keys);
    score(plan, worker, &part, row, &product, ahead);
    if (plan->is_rounded)
        for (int64_t r = 0; r < rows; r++)
            scale_row(worker->scores + row_start(r, CHUNK_UNITS, RESULT_VALUES), 2 * part.first_step, 2 * part.end_step,
                      worker->scales);
    else if (!is_staged)
        stage_values(plan, worker, visit, ahead);
    memcpy(part.value_steps, visit->value_steps, sizeof part.value_steps);
    const float scale = shape_scores(call, worker, &part, row, rows);
    for (int64_t r = 0; r < rows; r++)
        mask_row(worker->scores + row_start(r, CHUNK_UNITS, RESULT_VALUES), 2 * part.first_step, 2 * part.end_step,
                 seen[2 * r] - start, seen[2 * r + 1] - start);
    Mass masses[BLOCK_ROWS];
    soften(worker->scores, worker->weights, rows, part.first_step, part.end_step, scale,
           plan->is_rounded ? worker->scales + CHUNK : NULL, masses);
    weigh(plan, worker, &part, &product, ahead);
    keep(call, worker, visit, row, rows, masses);
}

static void write_output(const Call *call, int64_t token, int64_t head, const float *result, Mass mass) {
    bf16 *to = call->outputs + (token * call->plan->num_heads + head) * call->plan->value_dim;
    const float sum = call->sinks ? sum_with_sink(mass, call->sinks[head] * (float)LOG2_E) : mass.sum;
    for (int64_t dim = 0; dim < call->plan->value_dim; dim += LANES)
        store_bf16(to + dim, load_f32(result + dim) * (1.0f / sum));
}

/* Merge the parts of all chunks for one token and K/V head; uses worker->results as scratch. */
static void merge_parts(const Call *call, Worker *worker, const Visit *visit, int64_t row) {
    const Plan *plan = call->plan;
    const int64_t dim = plan->value_dim, token = row_token(plan, visit->item, row);
    for (int64_t end = row + group_size(plan); row < end; row++) {
        Mass mass = {-INFINITY, 0}, added;
        memset(worker->results, 0, (size_t)dim * sizeof(float));
        for (int64_t part = 0; part < plan->num_token_parts[token]; part++) {
            const float *from = call->parts + (plan->first_parts[token] + part) * plan->num_heads * part_values(plan);
            from += row_head(plan, visit, row) * part_values(plan);
            memcpy(&added, from + dim, sizeof added);
            merge(&mass, worker->results, added, from, LANES, dim);
        }
        write_output(call, token, row_head(plan, visit, row), worker->results, mass);
    }
}

static void close_item(const Call *call, Worker *worker, const Visit *visit) {
    const Plan *plan = call->plan;
    const int64_t rows = num_rows(plan, visit->item);
    if (visit->item->is_split) {
        for (int64_t row = 0; row < rows; row += group_size(plan)) {
            int64_t token = row_token(plan, visit->item, row);
            int32_t *arrivals = &plan->arrivals[token * plan->num_kv_heads + visit->head];
            /* The counts go on from layer to layer. */
            int32_t arrived = __atomic_add_fetch(arrivals, 1, __ATOMIC_ACQ_REL);
            if (arrived % plan->num_token_parts[token] == 0) merge_parts(call, worker, visit, row);
        }
        return;
    }
    for (int64_t row = 0; row < rows; row++)
        write_output(call, row_token(plan, visit->item, row), row_head(plan, visit, row),
                     worker->results + row * plan->value_dim, worker->masses[row]);
}

/* ---- the call ------------------------------------------------------------------------------------------------ */

/* A piece is one K/V head of some tokens. */
static void write_cache(const void *context, int64_t first, int64_t end) {
    const Call *call = context;
    const Plan *plan = call->plan;
    const int64_t *slots = plan->slots, spans = ceil_div(plan->num_tokens, WRITE_TOKENS);
    for (int64_t index = first; index < end; index++) {
        int64_t head = index / spans, span = index % spans, offset = head * plan->head_dim;
        int64_t end_token = pair_start(plan, min_of((span + 1) * WRITE_TOKENS, plan->num_tokens));
        for (int64_t token = pair_start(plan, span * WRITE_TOKENS); token < end_token; token++) {
            const int64_t block = slots[token] / plan->block_size, slot = slots[token] % plan->block_size;
            const bf16 *key = call->keys + token * call->key_stride + offset;
            const bf16 *value = call->values + token * call->value_stride + offset;
            char *to = call->cache + keys_offset(plan, block, head);
            if (plan->is_rounded) {
                write_rounded(plan, to, slot, key, value);
                continue;
            }
            write_key(plan, to, slot, key);
            if (!plan->is_latent) write_value(plan, to + values_offset(plan), slot, value);
        }
    }
}

static void run_worker(void *context, int thread) {
    const Call *call = context;
    Worker memory, *worker = &memory;
    lay_out(call->plan, call->memory + call->worker_bytes * (size_t)thread, worker);
    open_tiles();
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
    close_tiles();
}

/* Write this step's keys and values (num_tokens, num_kv_heads, head_dim) of one layer to its cache, then attend with
 * queries (num_tokens, num_heads, head_dim). outputs are (num_tokens, num_heads, value_dim). sinks (num_heads) are
 * logits that join the sums of exponentials, or NULL. Strides are from token to token, in values. Latents have no
 * values. bias (num_heads, 2 * bias_reach) is added to scores, or NULL: column bias_reach is that of a token's own
 * position. Without keys nothing is written, without queries nothing attends. */
void weft_attend(const Plan *plan, char *cache, const bf16 *queries, int64_t query_stride,
                 const bf16 *keys, int64_t key_stride, const bf16 *values, int64_t value_stride,
                 const float *sinks, const float *bias, int64_t bias_reach, bf16 *outputs) {
    static Scratch worker_scratch, part_scratch;
    Worker sizes;
    const size_t worker_bytes = (lay_out(plan, NULL, &sizes) + 4095) & ~(size_t)4095;
    const size_t part_bytes = (size_t)(plan->num_parts * plan->num_heads * part_values(plan)) * sizeof(float);
    Call call = {.plan = plan, .cache = cache, .queries = queries,
                 .keys = keys, .values = values, .query_stride = query_stride, .key_stride = key_stride,
                 .value_stride = value_stride, .sinks = sinks, .bias = bias, .bias_reach = bias_reach, .outputs = outputs,
                 .parts = scratch_reserve(&part_scratch, part_bytes), .worker_bytes = worker_bytes,
                 .memory = scratch_reserve(&worker_scratch, worker_bytes * (size_t)num_threads())};
    const int64_t pieces = keys ? ceil_div(plan->num_tokens, WRITE_TOKENS) * plan->num_kv_heads : 0;
    if (pieces) run_loop(pieces, plan->num_tokens < 4 ? pieces : 1, write_cache, &call);
    if (!queries) return;
    atomic_store(&next_work, 0);
    run_on_all(run_worker, &call);
}
