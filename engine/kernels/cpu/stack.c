/* Runs the layers of a decoder in one call. From Python each layer takes eight calls, and nothing runs between two. */
#include "attention_plan.h"
#include "kernels.h"
#include "scratch.h"

/* Mirrored in engine/kernels/cpu/run.py. */
typedef struct {
    Matrix qkv, o, gated, down; /* queries, keys and values stacked; gated.outputs is the size of gate times up */
    const bf16 *input_norm, *mlp_norm;
    const bf16 *head_norm; /* (num_heads + num_kv_heads, head_dim), or NULL */
    double norm_eps, head_norm_eps;
    const float *sinks; /* of attention (num_heads), or NULL */
    const Plan *plan; /* of this step */
    bf16 *cache;
    const bf16 *rotation; /* (num_tokens, 2, head_dim), of this step: see `weft_prepare_heads` */
} Layer;

static void multiply(const Matrix *matrix, const bf16 *inputs, int64_t rows, bf16 *outputs, Epilogue epilogue) {
    const int64_t k = matrix->inputs, n = matrix->outputs;
    if (matrix->scales)
        weft_linear_int8(inputs, k, rows, k, matrix->weights, matrix->scales, n, matrix->bias, outputs, n, epilogue);
    else
        weft_linear(inputs, k, rows, k, matrix->weights, n, matrix->bias, outputs, n, epilogue);
}

/* Size of a buffer of rows in values, rounded up so that the next buffer starts on a cache line. */
static int64_t buffer_values(int64_t rows, int64_t size) { return (rows * size + 31) / 32 * 32; }

/* Run num_layers layers of the same shape on hidden (num_tokens, hidden size), in place. */
void weft_run_layers(const Layer *layers, int64_t num_layers, int64_t num_tokens, bf16 *hidden) {
    static Scratch scratch;
    const int64_t size = layers->qkv.inputs, stride = layers->qkv.outputs, inner = layers->gated.outputs;
    const int64_t normed_values = buffer_values(num_tokens, size), qkv_values = buffer_values(num_tokens, stride);
    const int64_t attended_values = buffer_values(num_tokens, layers->o.inputs);
    const int64_t values = normed_values + qkv_values + attended_values + num_tokens * inner;
    bf16 *normed = scratch_reserve(&scratch, (size_t)values * sizeof(bf16)), *qkv = normed + normed_values;
    bf16 *attended = qkv + qkv_values, *gated = attended + attended_values;
    for (const Layer *layer = layers; layer < layers + num_layers; layer++) {
        const Plan *plan = layer->plan;
        const int64_t dim = plan->head_dim, num_rotated = plan->num_heads + plan->num_kv_heads;
        const bf16 *keys = qkv + plan->num_heads * dim, *new_values = keys + plan->num_kv_heads * dim;
        weft_rms_norm(hidden, size, num_tokens, size, layer->input_norm, (float)layer->norm_eps, normed);
        multiply(&layer->qkv, normed, num_tokens, qkv, STORE_BF16);
        weft_prepare_heads(qkv, stride, num_tokens, num_rotated, dim, layer->rotation, layer->head_norm,
                           (float)layer->head_norm_eps);
        weft_attend(plan, layer->cache, qkv, stride, keys, stride, new_values, stride, layer->sinks, attended);
        multiply(&layer->o, attended, num_tokens, hidden, ADD_BF16);
        weft_rms_norm(hidden, size, num_tokens, size, layer->mlp_norm, (float)layer->norm_eps, normed);
        multiply(&layer->gated, normed, num_tokens, gated, GATED_SILU);
        multiply(&layer->down, gated, num_tokens, hidden, ADD_BF16);
    }
}
