/* Linear layers over int8 weights with one scale per output, which read half the bytes of bfloat16.
 *
 * Packed layout: panels of 16 outputs, [n / 16][k][16], with k padded with zeros to whole tiles. Scales are float32; the
 * n scales are padded with zeros to whole panels.
 * Weights are converted to bfloat16 or float32 before the product, exactly, since 127 has seven bits. Sums are float32,
 * and the scale is applied last. Few rows convert weights straight from memory; many rows share panels converted once.
 */
#include "linear_product.h"

enum { INT8_TILE_BYTES = PANEL * TILE_K, WIDE_TILE_BYTES = 2 * INT8_TILE_BYTES };

/* ---- packing ------------------------------------------------------------------------------------------------- */

/* Quantize one row so that its largest magnitude becomes 127; returns the scale. */
static float pack_row(const bf16 *weights, int64_t k, int8_t *to) {
    bf16 largest = 0;
    for (int64_t i = 0; i < k; i++) {
        const bf16 magnitude = weights[i] & 0x7fff; /* magnitudes have the order of their bits */
        largest = magnitude > largest ? magnitude : largest;
    }
    const float scale = to_f32(largest) / 127.0f, divisor = largest ? scale : 1.0f;
    for (int64_t i = 0; i < k; i++) {
        const float shifted = to_f32(weights[i]) / divisor + 12582912.0f; /* 1.5 * 2^23: adding it rounds */
        memcpy(to + i * PANEL, &shifted, 1);
    }
    return scale;
}

typedef struct {
    const bf16 *weights;
    int64_t k, padded_k;
    int8_t *packed;
    float *scales;
} Packing;

static void pack_rows(const void *context, int64_t first, int64_t end) {
    const Packing *call = context;
    for (int64_t row = first; row < end; row++)
        call->scales[row] = pack_row(call->weights + row * call->k, call->k,
                                     call->packed + row / PANEL * PANEL * call->padded_k + row % PANEL);
}

/* Quantize weights (n, k), k even, into packed, which must be zero before, and scales (n). */
void weft_pack_linear_int8(const bf16 *weights, int64_t n, int64_t k, int8_t *packed, float *scales) {
    const Packing call = {weights, k, (k + TILE_K - 1) / TILE_K * TILE_K, packed, scales};
    run_loop(n, PANEL, pack_rows, &call);
}

typedef struct {
    const int8_t *packed;
    const float *scales;
    int64_t k, padded_k;
    const int64_t *ids;
    bf16 *to;
} Gathering;

static void gather_rows(const void *context, int64_t first, int64_t end) {
    const Gathering *call = context;
    for (int64_t row = first; row < end; row++) {
        const int64_t id = call->ids[row];
        const int8_t *from = call->packed + id / PANEL * PANEL * call->padded_k + id % PANEL;
        bf16 *to = call->to + row * call->k;
        for (int64_t i = 0; i < call->k; i++) to[i] = from_f32((float)from[i * PANEL] * call->scales[id]);
    }
}

/* Unpack some outputs: rows `ids` of the packed matrix as (num_ids, k). */
void weft_gather_rows_int8(const int8_t *packed, const float *scales, int64_t k, const int64_t *ids, int64_t num_ids,
                           bf16 *to) {
    const Gathering call = {packed, scales, k, (k + TILE_K - 1) / TILE_K * TILE_K, ids, to};
    run_loop(num_ids, 32, gather_rows, &call);
}

/* ---- products ------------------------------------------------------------------------------------------------ */

/* Widen one tile of weights, of 16 outputs and TILE_K inputs, to bfloat16. */
INLINE void widen_tile(const char *from, char *to) {
    for (int64_t line = 0; line < TILE_K / 2; line++) {
        if (line % 2 == 0) __builtin_prefetch(from + line * 32 + AHEAD_BYTES, 0, 2);
        store_bits(to + line * 64, widen_pairs((const int8_t *)from + line * 32));
    }
}

static Scratch wide_scratch; /* the panels of a unit as bfloat16, for each thread */

INLINE char *wide_panels(const Job *job, int thread) {
    return (char *)wide_scratch.memory + thread * UNIT_PANELS * 2 * job->panel_bytes;
}

#if defined(__AMX_BF16__)

/* Both products widen the weights of the next step while they multiply those of this step. A tile load that comes too
 * soon after its stores would wait for them to reach the cache. */

/* One tile of rows times four panels. */
static void multiply_1x4(const Job *job, const Unit *unit, float *sums) {
    const char *const *panels = unit->panels, *tiles = (const char *)(job->inputs + unit->row * job->padded_k);
    const int64_t steps = job->padded_k / TILE_K;
    _Alignas(64) char buffers[2][UNIT_PANELS][WIDE_TILE_BYTES];
    zero_sums();
    for (int64_t p = 0; p < UNIT_PANELS; p++) widen_tile(panels[p], buffers[0][p]);
    for (int64_t step = 0; step < steps; step++) {
        const int64_t next = (step + 1 < steps ? step + 1 : step) * INT8_TILE_BYTES;
        _tile_loadd(4, tiles + step * job->tile_bytes, job->row_bytes);
#define PANEL_STEP(P, REGISTER)                                   \
    widen_tile(panels[P] + next, buffers[(step + 1) % 2][P]);     \
    _tile_loadd(REGISTER, buffers[step % 2][P], 64);              \
    _tile_dpbf16ps(P, 4, REGISTER);
        PANEL_STEP(0, 5)
        PANEL_STEP(1, 6)
        PANEL_STEP(2, 7)
        PANEL_STEP(3, 5)
#undef PANEL_STEP
    }
    store_row_of_sums(sums);
}

/* Two tiles of rows times two panels, which are also stored as bfloat16 in wide[]. */
static void multiply_and_widen_2x2(const bf16 *tiles, const char *const panels[2], int64_t steps, char *const wide[2],
                                   float *sums) {
    const bf16 *second = tiles + steps * TILE_VALUES;
    zero_sums();
    for (int64_t p = 0; p < 2; p++) widen_tile(panels[p], wide[p]);
    for (int64_t step = 0; step < steps; step++) {
        const int64_t next = step + 1 < steps ? step + 1 : step, at = step * WIDE_TILE_BYTES;
        widen_tile(panels[0] + next * INT8_TILE_BYTES, wide[0] + next * WIDE_TILE_BYTES);
        _tile_loadd(6, wide[0] + at, 64);
        _tile_loadd(4, tiles + step * TILE_VALUES, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, second + step * TILE_VALUES, 64);
        _tile_dpbf16ps(2, 5, 6);
        widen_tile(panels[1] + next * INT8_TILE_BYTES, wide[1] + next * WIDE_TILE_BYTES);
        _tile_loadd(7, wide[1] + at, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
    }
    store_block_of_sums(sums);
}

void compute_int8_unit(const Job *job, const Unit *unit, int thread) {
    _Alignas(64) float sums[BLOCK_ROWS * BLOCK_COLUMNS];
    if (unit->rows <= TILE_ROWS) {
        multiply_1x4(job, unit, sums);
        finish_block(job, unit, unit->row, unit->rows, sums);
        return;
    }
    const bf16 *tiles = job->inputs + unit->row * job->padded_k;
    const int64_t steps = job->padded_k / TILE_K;
    char *wide[UNIT_PANELS];
    for (int64_t p = 0; p < UNIT_PANELS; p++) wide[p] = wide_panels(job, thread) + p * 2 * job->panel_bytes;
    for (int64_t p = 0; p < UNIT_PANELS; p += 2)
        multiply_and_widen_2x2(tiles, unit->panels + p, steps, wide + p, sums + p * PANEL);
    finish_block(job, unit, unit->row, unit->rows < BLOCK_ROWS ? unit->rows : BLOCK_ROWS, sums);
    Unit rest = *unit;
    rest.row += BLOCK_ROWS;
    rest.rows -= BLOCK_ROWS;
    if (rest.rows > 0) compute_blocks(job, &rest, (const char *const *)wide);
}

#else

void compute_int8_unit(const Job *job, const Unit *unit, int thread) {
    if (unit->rows <= ROWS_AT_ONCE) {
        compute_groups(job, unit, unit->panels, sizeof(int8_t));
        return;
    }
    const char *wide[UNIT_PANELS];
    for (int64_t p = 0; p < UNIT_PANELS; p++) {
        char *to = wide_panels(job, thread) + p * 2 * job->panel_bytes;
        for (int64_t step = 0; step < job->padded_k / TILE_K; step++)
            widen_tile(unit->panels[p] + step * INT8_TILE_BYTES, to + step * WIDE_TILE_BYTES);
        wide[p] = to;
    }
    compute_blocks(job, unit, wide);
}

#endif

/* Memory for the panels that `compute_int8_unit` widens; the largest job of a call says how much. */
void reserve_wide_panels(const Job *job) {
    scratch_reserve(&wide_scratch, (size_t)(num_threads() * UNIT_PANELS * 2 * job->panel_bytes));
}

/* Like `weft_linear`, with weights and scales from `weft_pack_linear_int8`. */
void weft_linear_int8(const bf16 *inputs, int64_t input_stride, int64_t rows, int64_t k, const int8_t *weights,
                      const float *scales, int64_t n, const bf16 *bias, void *outputs, int64_t output_stride,
                      int64_t epilogue) {
    Job job = {.rows = rows, .input_stride = input_stride, .k = k, .weights = weights, .scales = scales,
               .bias = bias, .n = n, .outputs = outputs, .output_stride = output_stride, .epilogue = (Epilogue)epilogue};
    plan_job(&job, sizeof(int8_t));
    reserve_wide_panels(&job);
    run_job(&job, inputs, compute_int8_unit);
}
