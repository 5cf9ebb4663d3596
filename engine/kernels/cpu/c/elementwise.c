/* The layers between two matrix products, each in one pass over memory; statistics in float32. */
#include <math.h>

#include "kernels.h"
#include "pool.h"

/* 1 / root mean square of size values, size a multiple of 16. */
INLINE float inverse_rms(const bf16 *values, int64_t size, float eps) {
    f32x16 squares = {0};
    for (int64_t i = 0; i < size; i += LANES) {
        const f32x16 part = load_bf16(values + i);
        squares += part * part;
    }
    return 1.0f / sqrtf(reduce_add(squares) / (float)size + eps);
}

typedef struct {
    const bf16 *inputs;
    int64_t input_stride, size;
    const float *weight, *bias; /* the bias may be NULL */
    float eps;
    bf16 *outputs;
    int64_t adds; /* to outputs, instead of storing them */
} Norm;

static void normalise_rows(const void *context, int64_t first, int64_t end) {
    const Norm *call = context;
    for (int64_t row = first; row < end; row++) {
        const bf16 *from = call->inputs + row * call->input_stride;
        bf16 *to = call->outputs + row * call->size;
        const float scale = inverse_rms(from, call->size, call->eps);
        for (int64_t i = 0; i < call->size; i += LANES) {
            const f32x16 before = call->adds ? load_bf16(to + i) : splat(0.0f);
            store_bf16(to + i, load_bf16(from + i) * scale * load_f32(call->weight + i));
            if (call->adds) store_bf16(to + i, before + load_bf16(to + i)); /* rounded twice, as by two layers */
        }
    }
}

/* RMSNorm of the rows of inputs (rows, input_stride), scaled by weight (size), stored in outputs (rows, size) or added to
 * them: Zhang and Sennrich, 2019. */
void weft_rms_norm(const bf16 *inputs, int64_t input_stride, int64_t rows, int64_t size, const float *weight, float eps,
                   bf16 *outputs, int64_t adds) {
    const Norm call = {inputs, input_stride, size, weight, NULL, eps, outputs, adds};
    run_loop(rows, grain(size), normalise_rows, &call);
}

/* Mean, then the deviation from it, then the results: three passes over a row that is in the first-level cache. */
static void centre_rows(const void *context, int64_t first, int64_t end) {
    const Norm *call = context;
    for (int64_t row = first; row < end; row++) {
        const bf16 *from = call->inputs + row * call->input_stride;
        bf16 *to = call->outputs + row * call->size;
        f32x16 sums = {0}, squares = {0};
        for (int64_t i = 0; i < call->size; i += LANES) sums += load_bf16(from + i);
        const float mean = reduce_add(sums) / (float)call->size;
        for (int64_t i = 0; i < call->size; i += LANES) {
            const f32x16 part = load_bf16(from + i) - mean;
            squares += part * part;
        }
        const float scale = 1.0f / sqrtf(reduce_add(squares) / (float)call->size + call->eps);
        for (int64_t i = 0; i < call->size; i += LANES) {
            f32x16 values = (load_bf16(from + i) - mean) * scale * load_f32(call->weight + i);
            if (call->bias) values += load_f32(call->bias + i);
            store_bf16(to + i, values);
        }
    }
}

/* LayerNorm of the rows of inputs (rows, input_stride), with weight and bias (size), bias may be NULL: Ba et al., 2016. */
void weft_layer_norm(const bf16 *inputs, int64_t input_stride, int64_t rows, int64_t size, const float *weight,
                     const float *bias, float eps, bf16 *outputs) {
    const Norm call = {inputs, input_stride, size, weight, bias, eps, outputs, 0};
    run_loop(rows, grain(size), centre_rows, &call);
}

/* One head: norm, unless weight is NULL, then rotation of the pairs (i, i + head_dim / 2). */
static void prepare_head(bf16 *head, int64_t head_dim, const bf16 *cosines, const bf16 *sines, const float *weight,
                         float eps) {
    const int64_t half = head_dim / 2;
    const float scale = weight ? inverse_rms(head, head_dim, eps) : 1.0f;
    for (int64_t i = 0; i < half; i += LANES) {
        f32x16 first = load_bf16(head + i), second = load_bf16(head + half + i);
        if (weight) {
            first *= scale * load_f32(weight + i);
            second *= scale * load_f32(weight + half + i);
        }
        /* the table's sines of the first half are negated */
        store_bf16(head + i, first * load_bf16(cosines + i) + second * load_bf16(sines + i));
        store_bf16(head + half + i, second * load_bf16(cosines + half + i) + first * load_bf16(sines + half + i));
    }
}

typedef struct {
    bf16 *heads;
    int64_t token_stride, num_heads, head_dim;
    const bf16 *rotation;
    const float *weights;
    float eps;
} Preparation;

static void prepare_tokens(const void *context, int64_t first, int64_t end) {
    const Preparation *call = context;
    const int64_t dim = call->head_dim;
    for (int64_t token = first; token < end; token++) {
        const bf16 *cosines = call->rotation + token * 2 * dim, *sines = cosines + dim;
        for (int64_t head = 0; head < call->num_heads; head++)
            prepare_head(call->heads + token * call->token_stride + head * dim, dim, cosines, sines,
                         call->weights ? call->weights + head * dim : NULL, call->eps);
    }
}

/* QK-norm and rotary embedding (Su et al., 2021), in place.
 *
 * heads (num_tokens, token_stride): changes the first num_heads heads of each token, which are queries and keys.
 * rotation (num_tokens, 2, head_dim): cosines and signed sines. weights (num_heads, head_dim), or NULL for no norm.
 * head_dim is a multiple of 32. */
void weft_prepare_heads(bf16 *heads, int64_t token_stride, int64_t num_tokens, int64_t num_heads, int64_t head_dim,
                        const bf16 *rotation, const float *weights, float eps) {
    const Preparation call = {heads, token_stride, num_heads, head_dim, rotation, weights, eps};
    run_loop(num_tokens, grain(num_heads * head_dim), prepare_tokens, &call);
}
