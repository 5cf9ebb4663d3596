/* Kernels that other C files call too; their definitions describe them. */
#ifndef WEFT_KERNELS_H
#define WEFT_KERNELS_H

#include "vectors.h"

typedef enum { STORE_BF16, STORE_F32, ADD_BF16, STORE_GELU, GATED_SILU, GATED_SWISH, GATED_GELU, GATED_TANH } Epilogue;

/* What a gate is before it is multiplied: SiLU, GELU, or GELU with a hyperbolic tangent, which is a sigmoid, too. */
INLINE f32x16 activated(Epilogue epilogue, f32x16 gate) {
    if (epilogue == GATED_GELU) return gelu(gate);
    const f32x16 steep = epilogue == GATED_TANH ? 1.5957691216f * (gate + 0.044715f * gate * gate * gate) : gate;
    return gate / (1.0f + vector_exp(-steep));
}

/* What GATED_SWISH computes of gate and up, both limited from above and up also from below:
 * gate * sigmoid(slope * (gate + cubic * gate^3)) * (up + offset). */
typedef struct {
    float slope, cubic, limit, offset;
} Gate;

/* Mirrored in engine/kernels/cpu/packed.py. */
typedef struct {
    const void *weights; /* packed; those of experts, or of gate and up, one after another */
    const float *scales; /* factor of each output of weights in groups, else NULL */
    const bf16 *bias;    /* or NULL */
    int64_t inputs, outputs; /* of one expert; outputs of gate times up */
    int64_t form; /* of weights in groups (grouped_layout.h), else 0 */
} Matrix;

/* What an adapter adds to the outputs from `first` on: see adapters.c. Mirrored, like the next two, in
 * engine/kernels/cpu/products.py. */
typedef struct {
    const bf16 *a, *b;
    int64_t rank, first, size;
} Delta;

/* The adapter of a slot at one matrix. */
typedef struct {
    const Delta *deltas;
    int64_t num_deltas;
} Slot;

/* The rows of a step by adapter. A piece is a few rows of one: its slot, the first of its rows in `rows`, and how many
 * these are. Rows without an adapter, slot 0, have the last pieces. */
typedef struct {
    const int64_t *rows;
    const int64_t (*pieces)[3];
    int64_t num_adapted, num_pieces;
} AdapterRows;

/* The requests of a step. Their tokens follow each other; request i's start at starts[i] and end at starts[i + 1].
 * states is where their states are: that of request i is the one at slots[i], and counts as zeros if is_new[i].
 * Mirrored, like `Space`, in engine/kernels/cpu/recurrent.py. */
typedef struct {
    const int64_t *starts, *slots;
    const uint8_t *is_new;
    int64_t num_requests;
    float *states;
} Requests;

typedef struct {
    int64_t num_heads, head_dim, state_size, num_groups;
    const float *decays, *skips, *time_bias;
    float time_scale, least_time, largest_time, gate_scale;
} Space;

struct Plan;

void weft_adapt(const bf16 *inputs, int64_t input_stride, int64_t k, const Slot *slots, const AdapterRows *rows,
                void *outputs, int64_t output_stride, int64_t is_float, bf16 *gated, int64_t gate);

void weft_attend(const struct Plan *plan, char *cache, const bf16 *queries, int64_t query_stride,
                 const bf16 *keys, int64_t key_stride, const bf16 *values, int64_t value_stride,
                 const float *sinks, const float *bias, int64_t bias_reach, bf16 *outputs);

void weft_convolve(const Requests *requests, const bf16 *inputs, int64_t input_stride, int64_t channels, int64_t kernel,
                   const float *taps, const float *bias, int64_t has_silu, bf16 *outputs);

void weft_linear(const bf16 *inputs, int64_t input_stride, int64_t rows, int64_t k, const bf16 *weights, int64_t n,
                 const bf16 *bias, void *outputs, int64_t output_stride, int64_t epilogue);

void weft_linear_grouped(const bf16 *inputs, int64_t input_stride, int64_t rows, int64_t k, const char *weights,
                         const float *factors, int64_t form, int64_t n, const bf16 *bias, void *outputs,
                         int64_t output_stride, int64_t epilogue);

void weft_prepare_heads(bf16 *heads, int64_t token_stride, int64_t num_tokens, int64_t num_heads, int64_t head_dim,
                        const bf16 *rotation, const float *weights, float eps);

void weft_rms_norm(const bf16 *inputs, int64_t input_stride, int64_t rows, int64_t size, const float *weight, float eps,
                   bf16 *outputs, int64_t adds);

void weft_scan_state_space(const Requests *requests, const Space *space, const bf16 *channels, int64_t channel_stride,
                           const bf16 *times, int64_t time_stride, const bf16 *gate, int64_t gate_stride, bf16 *outputs);

#endif
