/* Runs the layers of a decoder in one call. From Python each layer takes eight calls, and nothing runs between two. */
#include "attention_plan.h"
#include "kernels.h"
#include "pool.h"

/* Mamba 2. Mirrored in engine/kernels/cpu/recurrent.py. */
typedef struct {
    Matrix inputs, output; /* gate, inputs of the convolution and time steps stacked */
    int64_t channels, kernel;
    const float *taps, *bias;
    int64_t has_silu;
    const Space *space;
    const float *norm; /* of the outputs, or NULL */
    double norm_eps;
    Requests convolved, scanned; /* of this step */
} Mamba;

/* Mirrored in engine/kernels/cpu/block_run.py. */
typedef struct {
    Matrix qkv, o, gated, down; /* queries, keys and values stacked; gated.outputs is the size of gate times up */
    const float *input_norm, *o_norm, *mlp_norm, *down_norm; /* o_norm and down_norm are of outputs; NULL for none */
    const float *head_norm; /* (num_heads + num_kv_heads, head_dim), or NULL */
    double norm_eps, head_norm_eps;
    Epilogue gate;
    const float *sinks; /* of attention (num_heads), or NULL */
    const Plan *plan; /* of this step */
    char *cache;
    const bf16 *rotation; /* (num_tokens, 2, head_dim), of this step: see `weft_prepare_heads` */
    const Mamba *mamba; /* beside attention, or NULL */
    const Slot *qkv_slots, *o_slots, *gated_slots, *down_slots; /* of adapters, which are used in some steps */
} Layer;

static void multiply(const Matrix *matrix, const bf16 *inputs, int64_t rows, void *outputs, Epilogue epilogue) {
    const int64_t k = matrix->inputs, n = matrix->outputs;
    if (matrix->form)
        weft_linear_grouped(inputs, k, rows, k, matrix->weights, matrix->scales, matrix->form, n, matrix->bias, outputs, n,
                            epilogue);
    else
        weft_linear(inputs, k, rows, k, matrix->weights, n, matrix->bias, outputs, n, epilogue);
}

/* Size of a buffer of rows in values, rounded up so that the next buffer starts on a cache line. */
static int64_t buffer_values(int64_t rows, int64_t size) { return (rows * size + 31) / 32 * 32; }

/* Values that `mix_states` needs for a token. */
static int64_t mamba_values(const Mamba *mamba) {
    return mamba ? mamba->inputs.outputs + mamba->channels + 2 * mamba->output.inputs : 0;
}

/* What `mamba->output` takes, from normed (num_tokens, hidden size); lies in `memory`. */
static const bf16 *mix_states(const Mamba *mamba, const bf16 *normed, int64_t num_tokens, bf16 *memory) {
    const int64_t stride = mamba->inputs.outputs, channels = mamba->channels, width = mamba->output.inputs;
    bf16 *gate = memory, *convolved = gate + num_tokens * stride, *mixed = convolved + num_tokens * channels;
    multiply(&mamba->inputs, normed, num_tokens, gate, STORE_BF16);
    weft_convolve(&mamba->convolved, gate + width, stride, channels, mamba->kernel, mamba->taps, mamba->bias,
                  mamba->has_silu, convolved);
    weft_scan_state_space(&mamba->scanned, mamba->space, convolved, channels, gate + width + channels, stride, gate,
                          stride, mixed);
    if (!mamba->norm) return mixed;
    bf16 *outputs = mixed + num_tokens * width;
    weft_rms_norm(mixed, width, num_tokens, width, mamba->norm, (float)mamba->norm_eps, outputs, 0);
    return outputs;
}

/* The product of a matrix with what adapters add, unless rows is NULL. */
static void multiply_adapted(const Matrix *matrix, const Slot *slots, const AdapterRows *rows, const bf16 *inputs,
                             int64_t num_rows, bf16 *outputs, Epilogue epilogue) {
    multiply(matrix, inputs, num_rows, outputs, epilogue);
    if (rows) weft_adapt(inputs, matrix->inputs, matrix->inputs, slots, rows, outputs, matrix->outputs, 0, NULL, 0);
}

/* The same for gate and up, which get what adapters add before they are joined; sums has room for both. */
static void multiply_gated(const Layer *layer, const AdapterRows *rows, const bf16 *inputs, int64_t num_rows, float *sums,
                           bf16 *outputs) {
    Matrix both = layer->gated;
    if (!rows) {
        multiply(&both, inputs, num_rows, outputs, layer->gate);
        return;
    }
    both.outputs *= 2; /* whole panels, so that those of up follow those of gate */
    multiply(&both, inputs, num_rows, sums, STORE_F32);
    weft_adapt(inputs, both.inputs, both.inputs, layer->gated_slots, rows, sums, both.outputs, 1, outputs, layer->gate);
}

/* Add to hidden the product of a matrix, normed first unless norm is NULL; spare has room for the product. */
static void add_product(const Matrix *matrix, const Slot *slots, const AdapterRows *rows, const float *norm, float eps,
                        const bf16 *inputs, int64_t num_rows, bf16 *spare, bf16 *hidden) {
    const int64_t size = matrix->outputs;
    multiply_adapted(matrix, slots, rows, inputs, num_rows, norm ? spare : hidden, norm ? STORE_BF16 : ADD_BF16);
    if (norm) weft_rms_norm(spare, size, num_rows, size, norm, eps, hidden, 1);
}

/* Run num_layers layers of the same shape on hidden (num_tokens, hidden size), in place. Rows: those with adapters; NULL
 * if there are none. */
void weft_run_layers(const Layer *layers, int64_t num_layers, int64_t num_tokens, bf16 *hidden, const AdapterRows *rows) {
    static Scratch scratch;
    const int64_t size = layers->qkv.inputs, stride = layers->qkv.outputs, inner = layers->gated.outputs;
    const int64_t normed_values = buffer_values(num_tokens, size), qkv_values = buffer_values(num_tokens, stride);
    const int64_t attended_values = buffer_values(num_tokens, layers->o.inputs);
    const int64_t gated_values = buffer_values(num_tokens, inner);
    const int64_t values = normed_values + qkv_values + attended_values + gated_values
                           + num_tokens * (mamba_values(layers->mamba) + (rows ? 4 * inner : 0));
    bf16 *normed = scratch_reserve(&scratch, (size_t)values * sizeof(bf16)), *qkv = normed + normed_values;
    bf16 *attended = qkv + qkv_values, *gated = attended + attended_values;
    for (const Layer *layer = layers; layer < layers + num_layers; layer++) {
        const Plan *plan = layer->plan;
        const int64_t dim = plan->head_dim, num_rotated = plan->num_heads + plan->num_kv_heads;
        const float eps = (float)layer->norm_eps;
        const bf16 *keys = qkv + plan->num_heads * dim, *new_values = keys + plan->num_kv_heads * dim;
        weft_rms_norm(hidden, size, num_tokens, size, layer->input_norm, eps, normed, 0);
        const bf16 *mixed = layer->mamba ? mix_states(layer->mamba, normed, num_tokens, gated + gated_values) : NULL;
        multiply_adapted(&layer->qkv, layer->qkv_slots, rows, normed, num_tokens, qkv, STORE_BF16);
        weft_prepare_heads(qkv, stride, num_tokens, num_rotated, dim, layer->rotation, layer->head_norm,
                           (float)layer->head_norm_eps);
        weft_attend(plan, layer->cache, qkv, stride, keys, stride, new_values, stride, layer->sinks, NULL, 0,
                    attended);
        add_product(&layer->o, layer->o_slots, rows, layer->o_norm, eps, attended, num_tokens, normed, hidden);
        if (mixed) multiply(&layer->mamba->output, mixed, num_tokens, hidden, ADD_BF16);
        weft_rms_norm(hidden, size, num_tokens, size, layer->mlp_norm, eps, normed, 0);
        multiply_gated(layer, rows, normed, num_tokens, (float *)(gated + gated_values), gated);
        add_product(&layer->down, layer->down_slots, rows, layer->down_norm, eps, gated, num_tokens, normed, hidden);
    }
}
