/* Linear layers over packed bfloat16 weights, for any number of rows.
 *
 * Packed layout: panels of 16 outputs; in a panel, for every pair of inputs the 16 outputs' pairs: [n / 16][k / 2][16][2].
 * 64 bytes of it are one operand of the pair product, 1 KB of it is one AMX tile; k is padded with zeros to whole tiles.
 * Every output is the sum over k in one order, whatever the number of rows or threads: rows do not feel each other.
 */
#include "linear_product.h"

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
    store_row_of_sums(sums);
}

static void compute_unit(const Job *job, const Unit *unit) {
    if (job->rows > FEW_ROWS) {
        compute_blocks(job, unit, unit->panels);
        return;
    }
    _Alignas(64) float sums[TILE_ROWS * BLOCK_COLUMNS];
    multiply_1x4(job->inputs + unit->row * job->padded_k, unit->panels, job->padded_k / TILE_K, sums);
    finish_block(job, unit, unit->row, unit->rows, sums);
}

#else

static void compute_unit(const Job *job, const Unit *unit) { compute_blocks(job, unit, unit->panels); }

#endif

/* outputs (rows, n) = inputs (rows, k) x packed weights (n, k), k even, and what the epilogue makes of it:
 * 0 stores bfloat16, 1 stores float32, 2 adds to the bfloat16 outputs, 3 stores silu(gate) * up, where the gate's
 * panels come first, then as many panels of up (n is the size of one of them, and there is no bias).
 * Strides count values; bias may be NULL. */
void weft_linear(const bf16 *inputs, int64_t input_stride, int64_t rows, int64_t k, const bf16 *weights, int64_t n,
                 const bf16 *bias, void *outputs, int64_t output_stride, int64_t epilogue) {
    Job job = {.inputs = inputs, .rows = rows, .input_stride = input_stride, .k = k, .weights = weights, .bias = bias,
               .n = n, .outputs = outputs, .output_stride = output_stride, .epilogue = (Epilogue)epilogue};
    plan_job(&job, sizeof(bf16));
    run_job(&job, compute_unit);
}
