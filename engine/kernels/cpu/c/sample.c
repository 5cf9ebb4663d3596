/* Samples ids from logits: filters a row by its parameters, then draws one id.
 *
 * One thread computes a row, which stays in its cache after the first pass. The steps are those of engine/sampling: one
 * number per chunk says which chunks must be read again. */
#include <float.h>
#include <math.h>
#include <stdbool.h>

#include "pool.h"
#include "vectors.h"

enum { CHUNK = 128, NO_TOKEN_ID = -1 };

#define FIRST_CUT 1e-4f /* ids below this probability, relative to the best, are read only if the nucleus needs them */
#define LAST_UNIFORM (1.0 - 0x1p-24)

typedef struct {
    const float *logits;   /* (size) */
    const uint16_t *bits;  /* one per id, 1 allows; NULL allows all */
    int64_t size;
    float best, inverse;   /* the largest logit, and 1 / temperature */
} Row;

/* One thread's memory: maxima and sums of chunks, then the ids that are left, in the order of the vocabulary. */
typedef struct {
    float *maxima, *sums, *values;
    int32_t *ids;
    int64_t num_left;
} Left;

/* Logits of 16 ids; -infinity for banned ids and after the last id. */
INLINE f32x16 load_logits(const Row *row, int64_t id) {
    f32x16 values = splat(-INFINITY);
    if (id + LANES <= row->size)
        values = load_f32(row->logits + id);
    else if (id < row->size)
        memcpy(&values, row->logits + id, (size_t)(row->size - id) * sizeof(float));
    if (!row->bits || id >= row->size) return values;
    const u32x16 lanes = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
    const u32x16 is_allowed = (u32x16)((splat_bits(row->bits[id / LANES]) & lanes) != 0);
    return (f32x16)(((u32x16)values & is_allowed) | ((u32x16)splat(-INFINITY) & ~is_allowed));
}

INLINE f32x16 weigh(const Row *row, f32x16 logits) { return vector_exp((logits - row->best) * row->inverse); }

INLINE f32x16 keep(f32x16 values, float floor) { return (f32x16)((u32x16)values & (u32x16)(values >= floor)); }

/* Floats as whole numbers in the same order, and back. */
INLINE uint32_t to_rank(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

INLINE float from_rank(uint32_t rank) {
    const uint32_t bits = rank >> 31 ? rank & 0x7fffffffu : ~rank;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* The largest floor that at least `target` values reach, or values of at least that total mass; -infinity if there is
 * none. Bisects over all floats. The values are filled up to a whole chunk. */
INLINE float highest_floor(const float *values, int64_t size, double target, bool is_mass) {
    uint32_t low = to_rank(-INFINITY), high = to_rank(INFINITY) + 1;
    while (high - low > 1) {
        const uint32_t middle = low + (high - low) / 2;
        const float floor = from_rank(middle);
        double reached = 0;
        for (int64_t chunk = 0; chunk < size; chunk += CHUNK) {
            f32x16 sum = {0};
            for (int64_t i = chunk; i < chunk + CHUNK; i += LANES) {
                const f32x16 part = load_f32(values + i);
                sum += is_mass ? keep(part, floor) : (f32x16)((u32x16)splat(1.0f) & (u32x16)(part >= floor));
            }
            reached += (double)reduce_add(sum);
        }
        *(reached >= target ? &low : &high) = middle;
    }
    return from_rank(low);
}

static void fill_up(Left *left, int64_t count) {
    for (left->num_left = count; count % CHUNK; count++) left->values[count] = -INFINITY;
}

/* List the logits that reach the floor, which is above -infinity. */
static void list_logits(const Row *row, Left *left, float floor) {
    int64_t count = 0;
    for (int64_t first = 0; first < row->size; first += CHUNK) {
        if (!(left->maxima[first / CHUNK] >= floor)) continue;
        for (int64_t id = first; id < first + CHUNK; id += LANES) {
            const f32x16 logits = load_logits(row, id);
            for (int lane = 0; lane < LANES; lane++) {
                left->values[count] = logits[lane];
                left->ids[count] = (int32_t)(id + lane);
                count += logits[lane] >= floor;
            }
        }
    }
    fill_up(left, count);
}

static void drop_below(Left *left, float floor) {
    int64_t count = 0;
    for (int64_t i = 0; i < left->num_left; i++) {
        left->values[count] = left->values[i];
        left->ids[count] = left->ids[i];
        count += left->values[i] >= floor;
    }
    fill_up(left, count);
}

typedef enum { ROW, LISTED_LOGITS, LISTED_WEIGHTS } Source;

/* Store the sum of weights of each chunk, and return the total. The weights are those of a whole row, which are not
 * kept; of the listed logits, which they replace; or the listed weights that reach the floor, while others become 0. */
static double sum_up(const Row *row, Left *left, Source source, float floor) {
    const int64_t size = source == ROW ? row->size : left->num_left;
    double total = 0;
    for (int64_t chunk = 0; chunk < size; chunk += CHUNK) {
        f32x16 sum = {0};
        for (int64_t i = chunk; i < chunk + CHUNK; i += LANES) {
            f32x16 weights = source == ROW ? load_logits(row, i) : load_f32(left->values + i);
            weights = source == LISTED_WEIGHTS ? keep(weights, floor) : weigh(row, weights);
            if (source != ROW) store_f32(left->values + i, weights);
            sum += weights;
        }
        total += (double)(left->sums[chunk / CHUNK] = reduce_add(sum));
    }
    return total;
}

/* List the weights that min-p, top-k and top-p keep, and the sums of their chunks; returns the total. */
static double filter(const Row *row, Left *left, int64_t top_k, float top_p, float min_p) {
    const int64_t num_chunks = (row->size + CHUNK - 1) / CHUNK;
    const bool is_cut = top_k || min_p > 0;
    double total = is_cut ? 0 : sum_up(row, left, ROW, 0);
    float floor = row->best + logf(is_cut ? min_p : FIRST_CUT) / row->inverse;
    /* The k-th largest logit is at least the k-th largest of the chunks' maxima. */
    if (top_k && top_k <= num_chunks) floor = fmaxf(floor, highest_floor(left->maxima, num_chunks, (double)top_k, false));
    list_logits(row, left, fmaxf(floor, -FLT_MAX));
    if (top_k) drop_below(left, highest_floor(left->values, left->num_left, (double)top_k, false));
    const double mass = sum_up(row, left, LISTED_LOGITS, 0);
    if (is_cut) total = mass;
    if (top_p >= 1) return mass;
    if (mass < top_p * total) {
        list_logits(row, left, -FLT_MAX);
        sum_up(row, left, LISTED_LOGITS, 0);
    }
    /* The best id, whose weight is 1, is always kept. */
    floor = fminf(1, highest_floor(left->values, left->num_left, top_p * total, true));
    return sum_up(row, left, LISTED_WEIGHTS, floor);
}

/* The first index whose cumulative weight exceeds uniform * total. */
static int64_t draw(const Row *row, const Left *left, bool is_listed, double total, float uniform) {
    const int64_t size = is_listed ? left->num_left : row->size, last_chunk = (size - 1) / CHUNK;
    const double target = uniform * total;
    double before = 0, inner = 0;
    int64_t chunk = 0;
    while (chunk < last_chunk && !(before + (double)left->sums[chunk] > target)) before += (double)left->sums[chunk++];
    float weights[CHUNK];
    for (int64_t i = 0; i < CHUNK; i += LANES) {
        const int64_t at = chunk * CHUNK + i;
        store_f32(weights + i, is_listed ? load_f32(left->values + at) : weigh(row, load_logits(row, at)));
    }
    const int64_t num_inner = size - chunk * CHUNK < CHUNK ? size - chunk * CHUNK : CHUNK;
    for (int64_t i = 0; i < num_inner; i++) inner += (double)weights[i];
    /* The chunk's float32 sum may exceed its float64 sum by rounding; the rest must stay below the float64 sum. */
    const double rest = fmin(target - before, inner * LAST_UNIFORM);
    int64_t i = 0;
    for (inner = 0; i < num_inner - 1; i++)
        if ((inner += (double)weights[i]) > rest) break;
    return chunk * CHUNK + i;
}

/* Arguments of `weft_sample`. */
typedef struct {
    const float *logits;
    int64_t vocab_size;
    const uint32_t *bits;
    const int64_t *mask_rows;
    const float *temperatures, *top_ps, *min_ps, *uniforms;
    const int64_t *top_ks;
    int64_t *ids;
    float *memory;
    int64_t thread_values;
} Call;

static int64_t sample_row(const Call *call, int64_t index, Left *left) {
    const int64_t size = call->vocab_size, words = (size + 31) / 32;
    const int64_t mask = call->mask_rows[index];
    Row row = {call->logits + index * size, mask < 0 ? NULL : (const uint16_t *)(call->bits + mask * words), size,
               -INFINITY, fminf(1 / call->temperatures[index], FLT_MAX)};
    int64_t best_chunk = 0, num_chunks = 0;
    for (int64_t first = 0; first < size; first += CHUNK) {
        f32x16 highest = load_logits(&row, first);
        for (int64_t i = LANES; i < CHUNK; i += LANES) highest = larger(load_logits(&row, first + i), highest);
        const float maximum = left->maxima[num_chunks] = reduce_max(highest);
        if (maximum > row.best) row.best = maximum, best_chunk = num_chunks;
        num_chunks++;
    }
    if (row.best == -INFINITY) return mask < 0 ? 0 : NO_TOKEN_ID;
    if (call->temperatures[index] == 0 || row.best == INFINITY) {
        for (int64_t first = best_chunk * CHUNK;; first += LANES) {
            const f32x16 logits = load_logits(&row, first);
            for (int lane = 0; lane < LANES; lane++)
                if (logits[lane] == row.best) return first + lane;
        }
    }
    for (; num_chunks % CHUNK; num_chunks++) left->maxima[num_chunks] = -INFINITY;
    const float top_p = call->top_ps[index], min_p = call->min_ps[index], uniform = call->uniforms[index];
    const int64_t top_k = call->top_ks[index] < size ? call->top_ks[index] : 0;
    if (!top_k && top_p >= 1 && min_p <= 0) return draw(&row, left, false, sum_up(&row, left, ROW, 0), uniform);
    const double total = filter(&row, left, top_k, top_p, min_p);
    return left->ids[draw(&row, left, true, total, uniform)];
}

static void sample_rows(void *context, int thread) {
    const Call *call = context;
    float *memory = call->memory + thread * call->thread_values;
    const int64_t part = call->thread_values / 4;
    Left left = {memory, memory + part, memory + 2 * part, (int32_t *)(memory + 3 * part), 0};
    for (int64_t row = take_piece(thread); row >= 0; row = take_piece(thread)) call->ids[row] = sample_row(call, row, &left);
}

/* Sample one id for each row of logits (num_rows, vocab_size), which do not change.
 *
 * mask_rows (num_rows): index of each row's mask in bits (n, vocab_size / 32 rounded up), -1 for none. The others are
 * (num_rows): temperature 0 takes the best id, the lowest of equals; top_k 0, top_p 1 and min_p 0 keep all. A row
 * whose ids are all banned gets 0, or NO_TOKEN_ID if it has a mask. */
void weft_sample(const float *logits, int64_t num_rows, int64_t vocab_size, const uint32_t *bits, const int64_t *mask_rows,
                 const float *temperatures, const int64_t *top_ks, const float *top_ps, const float *min_ps,
                 const float *uniforms, int64_t *ids) {
    static Scratch scratch;
    const int64_t thread_values = 4 * ((vocab_size + CHUNK - 1) / CHUNK + 1) * CHUNK;
    float *memory = scratch_reserve(&scratch, (size_t)(num_threads() * thread_values) * sizeof(float));
    Call call = {logits, vocab_size, bits, mask_rows, temperatures, top_ps, min_ps, uniforms, top_ks, ids, memory,
                 thread_values};
    deal_pieces(num_rows);
    run_on_all(sample_rows, &call);
}
