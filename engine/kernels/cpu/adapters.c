/* Low-rank adapters: adds b (a x) to the outputs of a matrix, for the rows of a step that use an adapter.
 *
 * a has panels of 4 ranks: [rank / 4][k / 16][4][16]. b has panels of 16 outputs: [size / 16][rank][16]. Both are padded
 * with zeros, and lie one behind the other in memory, which is read from one end to the other. The order in which a row is
 * summed does not depend on the other rows.
 */
#include "kernels.h"
#include "pool.h"

enum { MAX_RANK = 512, RANKS = 4, ROWS = 4, AHEAD = 1024 }; /* values that are fetched before they are needed */

INLINE void fetch_ahead(const bf16 *weights) { __builtin_prefetch(weights + AHEAD, 0, 2); }

typedef struct {
    const bf16 *inputs;
    int64_t input_stride, k;
    const Slot *slots;
    const AdapterRows *rows;
    void *outputs; /* of bfloat16, or the sums of a gated matrix */
    int64_t output_stride, is_float;
    bf16 *gated; /* (rows, output_stride / 2), or NULL */
} Call;

/* sums (num_rows, rank) of a few rows and four ranks at a time. */
INLINE void shrink_rows(const bf16 *const *inputs, const int num_rows, int64_t k, const Delta *delta, float *sums) {
    const int64_t whole = k / LANES * LANES;
    const bf16 *a = delta->a;
    for (int64_t rank = 0; rank < delta->rank; rank += RANKS) {
        f32x16 totals[ROWS][RANKS] = {0};
        for (int64_t i = 0; i < whole; i += LANES, a += RANKS * LANES) {
            fetch_ahead(a);
            fetch_ahead(a + 2 * LANES);
            for (int row = 0; row < num_rows; row++) {
                const f32x16 x = load_bf16(inputs[row] + i);
                for (int r = 0; r < RANKS; r++) totals[row][r] += x * load_bf16(a + r * LANES);
            }
        }
        for (int row = 0; row < num_rows; row++) {
            bf16 last[LANES] = {0};
            memcpy(last, inputs[row] + whole, (size_t)(k - whole) * sizeof(bf16));
            for (int r = 0; r < RANKS; r++) {
                if (whole < k) totals[row][r] += load_bf16(last) * load_bf16(a + r * LANES);
                sums[row * MAX_RANK + rank + r] = reduce_add(totals[row][r]);
            }
        }
        if (whole < k) a += RANKS * LANES;
    }
}

INLINE void add_some(const Call *call, f32x16 values, int64_t place, int64_t count) {
    float *floats = (float *)call->outputs + place;
    bf16 *halves = (bf16 *)call->outputs + place;
    if (count >= LANES) {
        if (call->is_float)
            store_f32(floats, load_f32(floats) + values);
        else
            store_bf16(halves, load_bf16(halves) + values);
        return;
    }
    for (int64_t i = 0; i < count; i++)
        if (call->is_float)
            floats[i] += values[i];
        else
            halves[i] = from_f32(to_f32(halves[i]) + values[i]);
}

INLINE void expand_rows(const Call *call, const int64_t *rows, const int num_rows, const Delta *delta, const float *sums) {
    const bf16 *b = delta->b;
    for (int64_t first = 0; first < delta->size; first += LANES, b += delta->rank * LANES) {
        f32x16 totals[ROWS] = {0};
        for (int64_t r = 0; r < delta->rank; r++) {
            if (r % 2 == 0) fetch_ahead(b + r * LANES);
            const f32x16 weights = load_bf16(b + r * LANES);
            for (int row = 0; row < num_rows; row++) totals[row] += sums[row * MAX_RANK + r] * weights;
        }
        for (int row = 0; row < num_rows; row++)
            add_some(call, totals[row], rows[row] * call->output_stride + delta->first + first, delta->size - first);
    }
}

static void add_piece(const Call *call, const Slot *slot, const int64_t *rows, int64_t left) {
    float sums[ROWS * MAX_RANK];
    for (int64_t few; left > 0; rows += few, left -= few) {
        const bf16 *inputs[ROWS];
        few = left >= 4 ? 4 : left >= 2 ? 2 : 1;
        for (int64_t row = 0; row < few; row++) inputs[row] = call->inputs + rows[row] * call->input_stride;
        for (const Delta *delta = slot->deltas; delta < slot->deltas + slot->num_deltas; delta++) {
#define FEW(N)                                        \
    if (few == N) {                                   \
        shrink_rows(inputs, N, call->k, delta, sums); \
        expand_rows(call, rows, N, delta, sums);      \
    }
            FEW(4)
            FEW(2)
            FEW(1)
#undef FEW
        }
    }
}

/* silu(gate) * up, as the epilogue GATED_SILU of linear_job.h computes it. */
static void gate_row(const float *gate, int64_t size, bf16 *to) {
    for (int64_t i = 0; i < size; i += LANES) {
        const size_t count = size - i < LANES ? (size_t)(size - i) : LANES;
        float gates[LANES] = {0}, ups[LANES] = {0};
        memcpy(gates, gate + i, count * sizeof(float));
        memcpy(ups, gate + size + i, count * sizeof(float));
        const f32x16 values = load_f32(gates);
        const u16x16 halves = to_bf16(values / (1.0f + vector_exp(-values)) * load_f32(ups));
        memcpy(to + i, &halves, count * sizeof(bf16));
    }
}

static void add_pieces(const void *context, int64_t first, int64_t end) {
    const Call *call = context;
    for (int64_t index = first; index < end; index++) {
        const int64_t *piece = call->rows->pieces[index], *rows = call->rows->rows + piece[1], num_rows = piece[2];
        if (piece[0]) add_piece(call, call->slots + piece[0], rows, num_rows);
        for (int64_t row = 0; call->gated && row < num_rows; row++)
            gate_row((const float *)call->outputs + rows[row] * call->output_stride, call->output_stride / 2,
                     call->gated + rows[row] * call->output_stride / 2);
    }
}

/* Add to outputs of bfloat16, or of float32, what the adapters in `slots` make of inputs (rows, k). */
void weft_adapt(const bf16 *inputs, int64_t input_stride, int64_t k, const Slot *slots, const AdapterRows *rows,
                void *outputs, int64_t output_stride, int64_t is_float) {
    const Call call = {inputs, input_stride, k, slots, rows, outputs, output_stride, is_float, NULL};
    run_loop(rows->num_adapted, 1, add_pieces, &call);
}

/* The same for sums (rows, 2 * size) of a gated matrix; then outputs (rows, size) = silu(gate) * up of all rows. */
void weft_adapt_gated(const bf16 *inputs, int64_t input_stride, int64_t k, const Slot *slots, const AdapterRows *rows,
                      float *sums, int64_t size, bf16 *outputs) {
    const Call call = {inputs, input_stride, k, slots, rows, sums, 2 * size, 1, outputs};
    run_loop(rows->num_pieces, 1, add_pieces, &call);
}

typedef struct {
    const float *sums;
    int64_t size;
    bf16 *outputs;
} Gating;

static void gate_rows(const void *context, int64_t first, int64_t end) {
    const Gating *call = context;
    for (int64_t row = first; row < end; row++)
        gate_row(call->sums + 2 * row * call->size, call->size, call->outputs + row * call->size);
}

/* outputs (rows, size) = silu(gate) * up of sums (rows, 2 * size). */
void weft_gate(const float *sums, int64_t rows, int64_t size, bf16 *outputs) {
    const Gating call = {sums, size, outputs};
    run_loop(rows, 1, gate_rows, &call);
}
