/* Linear layers over packed bfloat16 weights, for any number of rows.
 *
 * Packed layout: panels of 16 outputs; in a panel, for every pair of inputs the 16 outputs' pairs: [n / 16][k / 2][16][2].
 * 64 bytes of it are one operand of the pair product, 1 KB of it is one AMX tile; k is padded with zeros to whole tiles.
 * Every output is the sum over k in one order, whatever the number of rows or threads: rows do not feel each other.
 */
#include "linear_job.h"

enum { AHEAD_BYTES = 2048 }; /* how far before its use a panel's weights are asked for */

/* ---- packing ------------------------------------------------------------------------------------------------- */

static void pack_panel(const bf16 *weights, int64_t rows, int64_t k, int64_t padded_k, uint32_t *to) {
    const uint32_t *pairs[LANES];
    for (int row = 0; row < LANES; row++) pairs[row] = row < rows ? (const uint32_t *)(weights + row * k) : NULL;
    const int64_t num_pairs = k / 2;
    for (int64_t start = 0; start < padded_k / 2; start += LANES)
        for (int row = 0; row < LANES; row++)
            for (int64_t pair = start; pair < start + LANES; pair++)
                to[pair * LANES + row] = pairs[row] && pair < num_pairs ? pairs[row][pair] : 0;
}

/* Pack weights (n, k), k even. */
void weft_pack_linear(const bf16 *weights, int64_t n, int64_t k, bf16 *packed) {
    const int64_t padded_k = (k + TILE_K - 1) / TILE_K * TILE_K;
#pragma omp parallel for schedule(static)
    for (int64_t panel = 0; panel < (n + PANEL - 1) / PANEL; panel++)
        pack_panel(weights + panel * PANEL * k, n - panel * PANEL, k, padded_k,
                   (uint32_t *)(packed + panel * PANEL * padded_k));
}

/* The reverse for some outputs: rows `ids` of the packed matrix as (num_ids, k). */
void weft_gather_rows(const bf16 *packed, int64_t k, const int64_t *ids, int64_t num_ids, bf16 *to) {
    const int64_t padded_k = (k + TILE_K - 1) / TILE_K * TILE_K;
#pragma omp parallel for schedule(static) if (num_ids > 64)
    for (int64_t row = 0; row < num_ids; row++) {
        const uint32_t *from = (const uint32_t *)(packed + ids[row] / PANEL * PANEL * padded_k) + ids[row] % PANEL;
        uint32_t *pairs = (uint32_t *)(to + row * k);
        for (int64_t pair = 0; pair < k / 2; pair++) pairs[pair] = from[pair * PANEL];
    }
}

/* ---- products ------------------------------------------------------------------------------------------------ */

#if defined(__AMX_BF16__)

/* The sums are tiles 0 to 3. */
INLINE void zero_sums(void) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

/* One tile of rows times four panels, whose weights come from memory. */
static void multiply_1x4(const bf16 *tiles, const char *const panels[UNIT_PANELS], int64_t steps, float *sums) {
    zero_sums();
    for (int64_t step = 0; step < steps; step++) {
        const int64_t at = step * 1024;
        _tile_loadd(4, tiles + step * TILE_VALUES, 64);
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
    _tile_stored(0, sums, BLOCK_COLUMNS * sizeof(float));
    _tile_stored(1, sums + PANEL, BLOCK_COLUMNS * sizeof(float));
    _tile_stored(2, sums + 2 * PANEL, BLOCK_COLUMNS * sizeof(float));
    _tile_stored(3, sums + 3 * PANEL, BLOCK_COLUMNS * sizeof(float));
}

/* Two tiles of rows times two panels: each load feeds two products. Meanwhile `lines` lines a step of the panels that
 * the next unit needs, from their line `ahead` on, come into the second-level cache. */
static void multiply_2x2(const bf16 *tiles, const char *const panels[2], int64_t steps, int64_t ahead, int64_t lines,
                         float *sums) {
    const bf16 *second = tiles + steps * TILE_VALUES;
    const char *next[2] = {panels[0] + steps * 1024 + ahead * 64, panels[1] + steps * 1024 + ahead * 64};
    zero_sums();
    for (int64_t step = 0; step < steps; step++) {
        const int64_t at = step * 1024;
        for (int64_t line = 0; line < lines; line++) {
            __builtin_prefetch(next[0] + 64 * line, 0, 2);
            __builtin_prefetch(next[1] + 64 * line, 0, 2);
        }
        next[0] += 64 * lines;
        next[1] += 64 * lines;
        _tile_loadd(6, panels[0] + at, 64);
        _tile_loadd(4, tiles + step * TILE_VALUES, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, panels[1] + at, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, second + step * TILE_VALUES, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    float *lower = sums + TILE_ROWS * BLOCK_COLUMNS;
    _tile_stored(0, sums, BLOCK_COLUMNS * sizeof(float));
    _tile_stored(1, sums + PANEL, BLOCK_COLUMNS * sizeof(float));
    _tile_stored(2, lower, BLOCK_COLUMNS * sizeof(float));
    _tile_stored(3, lower + PANEL, BLOCK_COLUMNS * sizeof(float));
}

static void compute_unit(const Job *job, const Unit *unit) {
    _Alignas(64) float sums[BLOCK_ROWS * BLOCK_COLUMNS];
    const int64_t steps = job->padded_k / TILE_K;
    const int64_t num_blocks = (unit->rows + BLOCK_ROWS - 1) / BLOCK_ROWS, lines = (16 + num_blocks - 1) / num_blocks;
    for (int64_t block = 0; block < num_blocks; block++) {
        const int64_t row = unit->row + block * BLOCK_ROWS, left = unit->row + unit->rows - row;
        const bf16 *tiles = job->inputs + row * job->padded_k;
        if (unit->rows <= TILE_ROWS) {
            multiply_1x4(tiles, unit->panels, steps, sums);
        } else {
            multiply_2x2(tiles, unit->panels, steps, block * steps * lines, lines, sums);
            multiply_2x2(tiles, unit->panels + 2, steps, block * steps * lines, lines, sums + 2 * PANEL);
        }
        finish_block(job, unit, row, left < BLOCK_ROWS ? left : BLOCK_ROWS, sums);
    }
}

#else

#if defined(__AVX512F__)
enum { ROWS_AT_ONCE = 8 }; /* 8 rows x 2 panels of sums fit into 32 registers */
#else
enum { ROWS_AT_ONCE = 2 };
#endif

/* Up to ROWS_AT_ONCE rows times two panels. */
INLINE void multiply_block(const Job *job, const bf16 *inputs, int rows, const char *const panels[2], float *sums) {
    f32x16 totals[ROWS_AT_ONCE][2] = {0};
    for (int64_t pair = 0; pair < job->k / 2; pair++) {
        const int64_t at = pair * 64;
        __builtin_prefetch(panels[0] + at + AHEAD_BYTES, 0, 2);
        __builtin_prefetch(panels[1] + at + AHEAD_BYTES, 0, 2);
        const u32x16 left = load_bits(panels[0] + at), right = load_bits(panels[1] + at);
        for (int row = 0; row < rows; row++) {
            uint32_t values;
            memcpy(&values, inputs + row * job->input_stride + 2 * pair, sizeof values);
            totals[row][0] = dot_pairs(totals[row][0], splat_bits(values), left);
            totals[row][1] = dot_pairs(totals[row][1], splat_bits(values), right);
        }
    }
    for (int row = 0; row < rows; row++) {
        store_f32(sums + row * BLOCK_COLUMNS, totals[row][0]);
        store_f32(sums + row * BLOCK_COLUMNS + PANEL, totals[row][1]);
    }
}

static void multiply_rows(const Job *job, const bf16 *inputs, int64_t rows, const char *const panels[2], float *sums) {
    switch (rows) {
        case 1: multiply_block(job, inputs, 1, panels, sums); break;
        case 2: multiply_block(job, inputs, 2, panels, sums); break;
#if defined(__AVX512F__)
        case 3: multiply_block(job, inputs, 3, panels, sums); break;
        case 4: multiply_block(job, inputs, 4, panels, sums); break;
        case 5: multiply_block(job, inputs, 5, panels, sums); break;
        case 6: multiply_block(job, inputs, 6, panels, sums); break;
        case 7: multiply_block(job, inputs, 7, panels, sums); break;
        case 8: multiply_block(job, inputs, 8, panels, sums); break;
#endif
    }
}

static void compute_unit(const Job *job, const Unit *unit) {
    float sums[ROWS_AT_ONCE * BLOCK_COLUMNS];
    for (int64_t done = 0; done < unit->rows; done += ROWS_AT_ONCE) {
        const int64_t row = unit->row + done, left = unit->rows - done;
        const int64_t rows = left < ROWS_AT_ONCE ? left : ROWS_AT_ONCE;
        const bf16 *inputs = job->inputs + row * job->input_stride;
        multiply_rows(job, inputs, rows, unit->panels, sums);
        multiply_rows(job, inputs, rows, unit->panels + 2, sums + 2 * PANEL);
        finish_block(job, unit, row, rows, sums);
    }
}

#endif

/* outputs (rows, n) = inputs (rows, k) x packed weights (n, k), k even, and what the epilogue makes of it:
 * 0 stores bfloat16, 1 stores float32, 2 adds to the bfloat16 outputs, 3 stores silu(gate) * up, where the gate's
 * panels come first, then as many panels of up (n is the size of one of them, and there is no bias).
 * Strides count values; bias may be NULL. */
void weft_linear(const bf16 *inputs, int64_t input_stride, int64_t rows, int64_t k, const bf16 *weights, int64_t n,
                 const bf16 *bias, void *outputs, int64_t output_stride, int64_t epilogue) {
    Job job = {.inputs = inputs, .rows = rows, .input_stride = input_stride, .k = k, .weights = weights, .bias = bias,
               .n = n, .outputs = outputs, .output_stride = output_stride, .epilogue = (Epilogue)epilogue};
    plan_job(&job);
    job.panel_bytes = PANEL * job.padded_k * (int64_t)sizeof(bf16);
#if defined(__AMX_BF16__)
    static Scratch scratch;
    const int64_t padded_rows = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS * BLOCK_ROWS;
    bf16 *tiles = scratch_reserve(&scratch, (size_t)(padded_rows * job.padded_k) * sizeof(bf16));
#endif
    deal_units(job.num_units);
#pragma omp parallel
    {
#if defined(__AMX_BF16__)
        tile_inputs(&job, tiles);
#pragma omp single
        job.inputs = tiles;
#endif
        open_tiles();
        for (int64_t index = take_unit(); index >= 0; index = take_unit()) {
            const Unit unit = unit_at(&job, index);
            compute_unit(&job, &unit);
        }
        close_tiles();
    }
}
