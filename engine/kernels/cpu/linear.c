/* Linear layers over packed bfloat16 weights, for any number of rows.
 *
 * Packed layout: panels of 16 outputs; in a panel, for every pair of inputs the 16 outputs' pairs: [n / 16][k / 2][16][2].
 * 64 bytes are one operand of the pair product, and 1 KB is one AMX tile; k is padded with zeros to whole tiles.
 * The order in which an output is summed over k does not depend on the number of rows or threads.
 */
#include "linear_product.h"
#include "transpose.h"

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
 * silu(gate) * up. For 4 the panels of gate come first, then as many of up; n is the size of one of them, and there is
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
