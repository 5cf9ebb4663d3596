/* Low-rank adapters: adds b (a x) to the outputs of a matrix, for the rows of a step that use an adapter.
 *
 * a and b are packed as in linear.c, in panels of 16 outputs: [outputs / 16][inputs / 2][16][2]. The outputs of a, the
 * ranks, are padded with zeros to a multiple of 16, its inputs to a multiple of 4. Both lie one behind the other in memory,
 * which is read from one end to the other. The order in which a row is summed does not depend on the other rows.
 */
#include "kernels.h"
#include "pairs.h"
#include "pool.h"

enum { MAX_RANK = 512, ROWS = 4, CHAINS = 2, PAIR_BYTES = 64, AHEAD_BYTES = 2048 };
enum { CHUNK = MAX_RANK }; /* inputs of a row that are prepared at a time */

typedef struct {
    const bf16 *inputs;
    int64_t input_stride, k;
    const Slot *slots;
    const AdapterRows *rows;
    void *outputs; /* of bfloat16, or the sums of a gated matrix */
    int64_t output_stride, is_float;
    bf16 *gated; /* (rows, output_stride / 2), or NULL */
    Epilogue gate;
} Call;

/* Add the products of a few rows of inputs (num_rows, CHUNK) with a part of a panel; num_pairs is even. Two chains of sums
 * for each row hide the time that an addition takes. */
INLINE void add_panel(const Input *inputs, const int num_rows, int64_t num_pairs, const char *panel, int part,
                      Sums totals[ROWS][CHAINS]) {
    for (int64_t pair = 0; pair < num_pairs; pair += CHAINS)
        for (int chain = 0; chain < CHAINS; chain++) {
            const char *at = panel + (pair + chain) * PAIR_BYTES;
            __builtin_prefetch(at + AHEAD_BYTES, 0, 2);
            const Pair weights = load_pair(at, part);
            for (int row = 0; row < num_rows; row++)
                totals[row][chain] = add_products(totals[row][chain], inputs + row * CHUNK + 2 * (pair + chain), weights);
        }
}

/* ranks (num_rows, MAX_RANK) = a x of a few rows. */
INLINE void shrink_rows(const bf16 *const *inputs, const int num_rows, int64_t k, const Delta *delta, Input *ranks) {
    const int64_t num_pairs = (k + 3) / 4 * 2;
    float sums[ROWS * MAX_RANK];
    for (int64_t rank = 0; rank < delta->rank; rank += LANES)
        for (int part = 0; part < PARTS; part++) {
            const char *panel = (const char *)(delta->a + rank * 2 * num_pairs);
            Sums totals[ROWS][CHAINS] = {0};
            for (int64_t start = 0; start < k; start += CHUNK) {
                Input chunk[ROWS * CHUNK];
                const int64_t count = k - start < CHUNK ? k - start : CHUNK, pairs = (count + 3) / 4 * 2;
                for (int row = 0; row < num_rows; row++) {
                    copy_inputs(chunk + row * CHUNK, inputs[row] + start, count);
                    for (int64_t i = count; i < 2 * pairs; i++) chunk[row * CHUNK + i] = 0;
                }
                add_panel(chunk, num_rows, pairs, panel + start / 2 * PAIR_BYTES, part, totals);
            }
            for (int row = 0; row < num_rows; row++) {
                const Sums sum = totals[row][0] + totals[row][1];
                memcpy(sums + row * MAX_RANK + rank + part * PART_LANES, &sum, sizeof sum);
            }
        }
    for (int row = 0; row < num_rows; row++) {
        float *values = sums + row * MAX_RANK;
        if (delta->rank % (2 * LANES)) store_f32(values + delta->rank, splat(0.0f));
        for (int64_t rank = 0; rank < delta->rank; rank += 2 * LANES)
            store_inputs(ranks + row * MAX_RANK + rank, load_f32(values + rank), load_f32(values + rank + LANES));
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

INLINE void expand_rows(const Call *call, const int64_t *rows, const int num_rows, const Delta *delta, const Input *ranks) {
    const char *panel = (const char *)delta->b;
    for (int64_t first = 0; first < delta->size; first += LANES, panel += delta->rank / 2 * PAIR_BYTES) {
        float sums[ROWS * LANES];
        for (int part = 0; part < PARTS; part++) {
            Sums totals[ROWS][CHAINS] = {0};
            add_panel(ranks, num_rows, delta->rank / 2, panel, part, totals);
            for (int row = 0; row < num_rows; row++) {
                const Sums sum = totals[row][0] + totals[row][1];
                memcpy(sums + row * LANES + part * PART_LANES, &sum, sizeof sum);
            }
        }
        for (int row = 0; row < num_rows; row++)
            add_some(call, load_f32(sums + row * LANES), rows[row] * call->output_stride + delta->first + first,
                     delta->size - first);
    }
}

static void add_piece(const Call *call, const Slot *slot, const int64_t *rows, int64_t left) {
    Input ranks[ROWS * MAX_RANK];
    for (int64_t few; left > 0; rows += few, left -= few) {
        const bf16 *inputs[ROWS];
        few = left >= 4 ? 4 : left >= 2 ? 2 : 1;
        for (int64_t row = 0; row < few; row++) inputs[row] = call->inputs + rows[row] * call->input_stride;
        for (const Delta *delta = slot->deltas; delta < slot->deltas + slot->num_deltas; delta++) {
#define FEW(N)                                         \
    if (few == N) {                                    \
        shrink_rows(inputs, N, call->k, delta, ranks); \
        expand_rows(call, rows, N, delta, ranks);      \
    }
            FEW(4)
            FEW(2)
            FEW(1)
#undef FEW
        }
    }
}

/* activation(gate) * up, as an epilogue of linear_job.h computes it. */
static void gate_row(Epilogue epilogue, const float *gate, int64_t size, bf16 *to) {
    for (int64_t i = 0; i < size; i += LANES) {
        const size_t count = size - i < LANES ? (size_t)(size - i) : LANES;
        float gates[LANES] = {0}, ups[LANES] = {0};
        memcpy(gates, gate + i, count * sizeof(float));
        memcpy(ups, gate + size + i, count * sizeof(float));
        const u16x16 halves = to_bf16(activated(epilogue, load_f32(gates)) * load_f32(ups));
        memcpy(to + i, &halves, count * sizeof(bf16));
    }
}

static void add_pieces(const void *context, int64_t first, int64_t end) {
    const Call *call = context;
    for (int64_t index = first; index < end; index++) {
        const int64_t *piece = call->rows->pieces[index], *rows = call->rows->rows + piece[1], num_rows = piece[2];
        if (piece[0]) add_piece(call, call->slots + piece[0], rows, num_rows);
        for (int64_t row = 0; call->gated && row < num_rows; row++)
            gate_row(call->gate, (const float *)call->outputs + rows[row] * call->output_stride, call->output_stride / 2,
                     call->gated + rows[row] * call->output_stride / 2);
    }
}

/* Add to outputs of bfloat16, or of float32, what the adapters in `slots` make of inputs (rows, k). Unless gated is NULL,
 * outputs (rows, 2 * size) are the sums of a gated matrix; then gated (rows, size) = activation(gate) * up of all rows. */
void weft_adapt(const bf16 *inputs, int64_t input_stride, int64_t k, const Slot *slots, const AdapterRows *rows,
                void *outputs, int64_t output_stride, int64_t is_float, bf16 *gated, int64_t gate) {
    const Call call = {inputs, input_stride, k, slots, rows, outputs, output_stride, is_float, gated, (Epilogue)gate};
    run_loop(gated ? rows->num_pieces : rows->num_adapted, 1, add_pieces, &call);
}

typedef struct {
    Epilogue epilogue;
    const float *sums;
    int64_t size;
    bf16 *outputs;
} Gating;

static void gate_rows(const void *context, int64_t first, int64_t end) {
    const Gating *call = context;
    for (int64_t row = first; row < end; row++)
        gate_row(call->epilogue, call->sums + 2 * row * call->size, call->size, call->outputs + row * call->size);
}

/* outputs (rows, size) = activation(gate) * up of sums (rows, 2 * size). */
void weft_gate(int64_t epilogue, const float *sums, int64_t rows, int64_t size, bf16 *outputs) {
    const Gating call = {(Epilogue)epilogue, sums, size, outputs};
    run_loop(rows, 1, gate_rows, &call);
}
