/* Linear layers over packed bfloat16 weights, for any number of rows.
 *
 * Packed layout: panels of 16 outputs; in a panel, for every pair of inputs the 16 outputs' pairs: [n / 16][k / 2][16][2].
 * 64 bytes are one operand of the pair product, and 1 KB is one AMX tile; k is padded with zeros to whole tiles.
 * The order in which an output is summed over k does not depend on the number of rows or threads.
 */
#include "linear_job.h"
#include "vectors.h"

/* ---- rows times panels: each product takes the pairs of inputs one after another ------------------------------- */

enum { AHEAD_BYTES = 2048, NEAR_BYTES = 512 }; /* prefetch distances in a panel: to the second-level cache, the first */

#if defined(__AMX_BF16__)

enum { ROWS_AT_ONCE = TILE_ROWS };

/* The sums are tiles 0 to 3. */
INLINE void zero_sums(void) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

/* 16 rows times four panels. */
INLINE void store_row_of_sums(float *sums) {
    _tile_stored(0, sums, BLOCK_COLUMNS * sizeof(float));
    _tile_stored(1, sums + PANEL, BLOCK_COLUMNS * sizeof(float));
    _tile_stored(2, sums + 2 * PANEL, BLOCK_COLUMNS * sizeof(float));
    _tile_stored(3, sums + 3 * PANEL, BLOCK_COLUMNS * sizeof(float));
}

/* 32 rows times two panels. */
INLINE void store_block_of_sums(float *sums) {
    float *lower = sums + TILE_ROWS * BLOCK_COLUMNS;
    _tile_stored(0, sums, BLOCK_COLUMNS * sizeof(float));
    _tile_stored(1, sums + PANEL, BLOCK_COLUMNS * sizeof(float));
    _tile_stored(2, lower, BLOCK_COLUMNS * sizeof(float));
    _tile_stored(3, lower + PANEL, BLOCK_COLUMNS * sizeof(float));
}

/* Two tiles of rows times two panels: each load feeds two products. Each step also prefetches `lines` cache lines from
 * both `next` into the second-level cache. */
static void multiply_2x2(const bf16 *tiles, const char *const panels[2], int64_t steps, const char *const next[2],
                         int64_t lines, float *sums) {
    const bf16 *second = tiles + steps * TILE_VALUES;
    const char *left = next[0], *right = next[1];
    zero_sums();
    for (int64_t step = 0; step < steps; step++) {
        const int64_t at = step * 1024;
        for (int64_t line = 0; line < lines; line++) {
            __builtin_prefetch(left + 64 * line, 0, 2);
            __builtin_prefetch(right + 64 * line, 0, 2);
        }
        left += 64 * lines;
        right += 64 * lines;
        _tile_loadd(6, panels[0] + at, 64);
        _tile_loadd(4, tiles + step * TILE_VALUES, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, panels[1] + at, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, second + step * TILE_VALUES, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    store_block_of_sums(sums);
}

/* Compute a unit of any number of rows, and prefetch the panels of the next unit. */
static void compute_blocks(const Job *job, const Unit *unit) {
    _Alignas(64) float sums[BLOCK_ROWS * BLOCK_COLUMNS];
    const int64_t steps = job->padded_k / TILE_K, num_blocks = (unit->rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    int64_t lines = (job->panel_bytes / steps / 64 + num_blocks - 1) / num_blocks;
    int64_t ahead = job->unit_step * job->panel_bytes;
    if (num_blocks <= 2) { /* too few products to hide a unit's load: prefetch within it */
        ahead = AHEAD_BYTES;
        lines = TILE_ROWS;
    }
    for (int64_t block = 0; block < num_blocks; block++) {
        const int64_t row = unit->row + block * BLOCK_ROWS, left = unit->row + unit->rows - row;
        const bf16 *tiles = job->inputs + row * job->padded_k;
        for (int64_t p = 0; p < UNIT_PANELS; p += 2) {
            const char *const next[2] = {unit->panels[p] + ahead, unit->panels[p + 1] + ahead};
            multiply_2x2(tiles, unit->panels + p, steps, next, lines, sums + p * PANEL);
        }
        finish_block(job, unit, row, left < BLOCK_ROWS ? left : BLOCK_ROWS, sums);
        ahead += steps * lines * 64;
        if (lines == TILE_ROWS) lines = 0; /* everything is in the cache after the first block */
    }
}

#else

/* Few rows take all panels of a unit at once, because memory serves four streams faster than two. */
#if defined(__AVX512BF16__)
enum { ROWS_AT_ONCE = 12, FEW_AT_ONCE = 6, FEW_COLUMNS = 4 }; /* of 32 registers 24 for sums, up to 4 for weights */
#elif defined(__AVX512F__)
enum { ROWS_AT_ONCE = 12, FEW_AT_ONCE = 5, FEW_COLUMNS = 4 }; /* weights are widened to twice as many registers */
#else
enum { ROWS_AT_ONCE = 4, FEW_AT_ONCE = 4, FEW_COLUMNS = COLUMNS_AT_ONCE }; /* of 16 registers 8 for sums, 4 for weights */
#endif

/* What a group of rows prefetches: few rows the panels that they read, others a share of the next unit's. */
typedef struct {
    const char *const *panels; /* of this unit */
    int64_t at, step;          /* offset in bytes, and bytes per pair of inputs in 24.8 fixed point */
} Ahead;

/* Panels that are multiplied at once with so many rows. */
INLINE int columns_for(int64_t rows) { return rows <= FEW_AT_ONCE ? FEW_COLUMNS : COLUMNS_AT_ONCE; }

/* Up to ROWS_AT_ONCE rows times `columns_for(rows)` panels. */
INLINE void multiply_block(const Job *job, const Input *inputs, int rows, const char *const *panels, Ahead ahead,
                           float *sums) {
    const int columns = columns_for(rows);
    Sums totals[ROWS_AT_ONCE][UNIT_PANELS][PARTS] = {0};
    for (int64_t pair = 0; pair < job->k / 2; pair++) {
        Pair weights[UNIT_PANELS][PARTS];
        for (int p = 0; p < columns; p++) {
            const char *at = panels[p] + pair * 2 * PANEL * (int64_t)sizeof(bf16);
            __builtin_prefetch(at + NEAR_BYTES, 0, 3);
            __builtin_prefetch(ahead.panels[p] + ahead.at + (pair * ahead.step >> 8), 0, 2);
            for (int part = 0; part < PARTS; part++) weights[p][part] = load_pair(at, part);
        }
        for (int row = 0; row < rows; row++) {
            const Input *values = inputs + row * job->input_stride + 2 * pair;
            for (int p = 0; p < columns; p++)
                for (int part = 0; part < PARTS; part++)
                    totals[row][p][part] = add_products(totals[row][p][part], values, weights[p][part]);
        }
    }
    for (int row = 0; row < rows; row++)
        for (int p = 0; p < columns; p++)
            memcpy(sums + row * BLOCK_COLUMNS + p * PANEL, totals[row][p], PANEL * sizeof(float));
}

INLINE void multiply_rows(const Job *job, const Input *inputs, int64_t rows, const char *const *panels, Ahead ahead,
                          float *sums) {
    switch (rows) {
#define CASE(ROWS) \
    case ROWS: multiply_block(job, inputs, ROWS, panels, ahead, sums); break;
        CASE(1)
        CASE(2)
        CASE(3)
        CASE(4)
#if defined(__AVX512F__)
        CASE(5)
        CASE(6)
        CASE(7)
        CASE(8)
        CASE(9)
        CASE(10)
        CASE(11)
        CASE(12)
#endif
#undef CASE
    }
}

/* Compute a unit of any number of rows, in blocks of equal size but for the last. All blocks prefetch equal shares of the
 * next unit, which spreads its loads over the time of this one. */
static void compute_blocks(const Job *job, const Unit *unit) {
    float sums[ROWS_AT_ONCE * BLOCK_COLUMNS];
    const int64_t num_blocks = (unit->rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
    const int64_t block_rows = (unit->rows + num_blocks - 1) / num_blocks, share = job->panel_bytes / num_blocks;
    Ahead ahead = {.at = unit->rows <= FEW_AT_ONCE ? AHEAD_BYTES : job->unit_step * job->panel_bytes,
                   .step = (share << 8) / (job->k / 2)};
    for (int64_t done = 0; done < unit->rows; done += block_rows, ahead.at += share) {
        const int64_t row = unit->row + done, left = unit->rows - done;
        const int64_t rows = left < block_rows ? left : block_rows;
        const Input *inputs = job->inputs + row * job->input_stride;
        for (int64_t p = 0; p < UNIT_PANELS; p += columns_for(rows)) {
            ahead.panels = unit->panels + p;
            multiply_rows(job, inputs, rows, ahead.panels, ahead, sums + p * PANEL);
        }
        finish_block(job, unit, row, rows, sums);
    }
}

#endif

/* ---- packing ------------------------------------------------------------------------------------------------- */

/* Pack 16 rows of weights, or fewer at the end, as one panel. */
static void pack_panel(const bf16 *weights, int64_t rows, int64_t k, int64_t padded_k, char *to) {
    for (int64_t start = 0; start < padded_k; start += 2 * LANES, to += sizeof(u32x16[LANES])) {
        const int64_t left = k - start < 2 * LANES ? k - start : 2 * LANES;
        u32x16 lines[LANES] = {0};
        for (int row = 0; row < LANES && row < rows; row++) {
            const bf16 *from = weights + row * k + start;
            if (left == 2 * LANES)
                lines[row] = load_bits(from);
            else
                memcpy(&lines[row], from, (size_t)left * sizeof(bf16));
        }
        transpose(lines);
        for (int pair = 0; pair < LANES; pair++) store_bits(to + pair * sizeof(u32x16), lines[pair]);
    }
}

typedef struct {
    const bf16 *weights;
    int64_t n, k, padded_k;
    bf16 *packed;
} Packing;

static void pack_panels(const void *context, int64_t first, int64_t end) {
    const Packing *call = context;
    for (int64_t panel = first; panel < end; panel++)
        pack_panel(call->weights + panel * PANEL * call->k, call->n - panel * PANEL, call->k, call->padded_k,
                   (char *)(call->packed + panel * PANEL * call->padded_k));
}

/* Pack weights (n, k), k even. */
void weft_pack_linear(const bf16 *weights, int64_t n, int64_t k, bf16 *packed) {
    const Packing call = {weights, n, k, (k + TILE_K - 1) / TILE_K * TILE_K, packed};
    run_loop((n + PANEL - 1) / PANEL, 8, pack_panels, &call);
}

typedef struct {
    const bf16 *packed;
    int64_t k, padded_k;
    const int64_t *ids;
    bf16 *to;
} Gathering;

static void gather_rows(const void *context, int64_t first, int64_t end) {
    const Gathering *call = context;
    for (int64_t row = first; row < end; row++) {
        const int64_t id = call->ids[row];
        const uint32_t *from = (const uint32_t *)(call->packed + id / PANEL * PANEL * call->padded_k) + id % PANEL;
        uint32_t *pairs = (uint32_t *)(call->to + row * call->k);
        for (int64_t pair = 0; pair < call->k / 2; pair++) pairs[pair] = from[pair * PANEL];
    }
}

/* Unpack some outputs: rows `ids` of the packed matrix as (num_ids, k). */
void weft_gather_rows(const bf16 *packed, int64_t k, const int64_t *ids, int64_t num_ids, bf16 *to) {
    const Gathering call = {packed, k, (k + TILE_K - 1) / TILE_K * TILE_K, ids, to};
    run_loop(num_ids, 32, gather_rows, &call);
}

/* ---- products ------------------------------------------------------------------------------------------------ */

#if defined(__AMX_BF16__)

/* One tile of rows times four panels; weights come straight from memory. */
static void multiply_1x4(const Job *job, const Unit *unit, float *sums) {
    const char *const *panels = unit->panels, *tiles = (const char *)(job->inputs + unit->row * job->padded_k);
    const int64_t steps = job->padded_k / TILE_K;
    zero_sums();
    for (int64_t step = 0; step < steps; step++) {
        const int64_t at = step * 1024;
        _tile_loadd(4, tiles + step * job->tile_bytes, job->row_bytes);
#define PANEL_STEP(P, REGISTER)                   \
    prefetch_tile(panels[P] + at + AHEAD_BYTES);  \
    _tile_loadd(REGISTER, panels[P] + at, 64);    \
    _tile_dpbf16ps(P, 4, REGISTER);
        PANEL_STEP(0, 5)
        PANEL_STEP(1, 6)
        PANEL_STEP(2, 7)
        PANEL_STEP(3, 5)
#undef PANEL_STEP
    }
    store_row_of_sums(sums);
}

void compute_unit(const Job *job, const Unit *unit, int thread) {
    (void)thread;
    if (job->rows > FEW_ROWS) {
        compute_blocks(job, unit);
        return;
    }
    _Alignas(64) float sums[TILE_ROWS * BLOCK_COLUMNS];
    multiply_1x4(job, unit, sums);
    finish_block(job, unit, unit->row, unit->rows, sums);
}

#else

void compute_unit(const Job *job, const Unit *unit, int thread) {
    (void)thread;
    compute_blocks(job, unit);
}

#endif

/* outputs (rows, n) = epilogue of inputs (rows, k) x packed weights (n, k), k even.
 * Epilogues: 0 stores bfloat16, 1 stores float32, 2 adds to the bfloat16 outputs, 3 stores their GELU, 4 stores
 * silu(gate) * up, 6 and 7 the same with GELUs. For these the panels of gate come first, then as many of up; n is the size of one of them, and there is
 * no bias. Strides are in values; bias may be NULL. */
void weft_linear(const bf16 *inputs, int64_t input_stride, int64_t rows, int64_t k, const bf16 *weights, int64_t n,
                 const bf16 *bias, void *outputs, int64_t output_stride, int64_t epilogue) {
    Job job = {.rows = rows, .input_stride = input_stride, .k = k, .weights = weights, .bias = bias,
               .n = n, .outputs = outputs, .output_stride = output_stride, .epilogue = (Epilogue)epilogue};
    plan_job(&job);
    run_job(&job, inputs, compute_unit);
}

/* The same for heads, each with a matrix of its own: inputs (rows, heads, k) -> outputs (rows, heads, n) of bfloat16. The
 * strides are those from row to row and from head to head; the packed matrices follow each other. */
void weft_linear_heads(const bf16 *inputs, int64_t row_stride, int64_t head_stride, int64_t rows, int64_t heads, int64_t k,
                       const bf16 *weights, int64_t n, bf16 *outputs) {
    const int64_t padded_k = (k + TILE_K - 1) / TILE_K * TILE_K, matrix = (n + PANEL - 1) / PANEL * PANEL * padded_k;
    for (int64_t head = 0; head < heads; head++)
        weft_linear(inputs + head * head_stride, row_stride, rows, k, weights + head * matrix, n, NULL, outputs + head * n,
                    heads * n, STORE_BF16);
}
