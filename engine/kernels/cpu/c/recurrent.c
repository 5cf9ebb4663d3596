/* Recurrent layers over bfloat16 inputs: causal convolution, the state space of Mamba 2, the selective scan of Mamba.
 *
 * States are float32 and change in place. A piece of work is a part of one request's state, over all tokens that the
 * request computes: for a decode the state is read and written once, and a prompt finds it in the cache. So the bits do
 * not depend on how a prompt is divided into steps, nor on the other requests.
 */
#include <math.h>

#include "kernels.h"
#include "pool.h"
#include "vectors.h"

#define MAX_KERNEL 8
#define MAX_SIZE 256 /* of a head, and of a state's rows */

/* num_values of a request's state, from `first` on. */
static float *state_of(const Requests *requests, int64_t request, int64_t state_size, int64_t first, int64_t num_values) {
    float *state = requests->states + requests->slots[request] * state_size + first;
    if (requests->is_new[request]) memset(state, 0, (size_t)num_values * sizeof(float));
    return state;
}

INLINE f32x16 silu(f32x16 values) { return values / (1.0f + vector_exp(-values)); }

/* ---- convolution --------------------------------------------------------------------------------------------- */

typedef struct {
    Requests requests;
    const bf16 *inputs;
    int64_t input_stride, channels, kernel;
    const float *taps, *bias;
    int64_t has_silu;
    bf16 *outputs;
} Convolution;

/* 16 channels of one request. */
static void convolve_channels(const Convolution *call, int64_t request, int64_t channel) {
    const int64_t length = call->kernel - 1;
    float *state = state_of(&call->requests, request, call->channels * length, channel * length, LANES * length);
    float before[MAX_KERNEL][LANES]; /* the state, transposed */
    for (int64_t tap = 0; tap < length; tap++)
        for (int64_t lane = 0; lane < LANES; lane++) before[tap][lane] = state[lane * length + tap];
    f32x16 window[MAX_KERNEL];
    for (int64_t tap = 0; tap < length; tap++) window[tap] = load_f32(before[tap]);
    for (int64_t token = call->requests.starts[request]; token < call->requests.starts[request + 1]; token++) {
        window[length] = load_bf16(call->inputs + token * call->input_stride + channel);
        f32x16 sum = call->bias ? load_f32(call->bias + channel) : splat(0.0f);
        for (int64_t tap = 0; tap <= length; tap++)
            sum += window[tap] * load_f32(call->taps + tap * call->channels + channel);
        store_bf16(call->outputs + token * call->channels + channel, call->has_silu ? silu(sum) : sum);
        for (int64_t tap = 0; tap < length; tap++) window[tap] = window[tap + 1];
    }
    for (int64_t tap = 0; tap < length; tap++) store_f32(before[tap], window[tap]);
    for (int64_t lane = 0; lane < LANES; lane++)
        for (int64_t tap = 0; tap < length; tap++) state[lane * length + tap] = before[tap][lane];
}

static void convolve_pieces(const void *context, int64_t first, int64_t end) {
    const Convolution *call = context;
    const int64_t parts = call->channels / LANES;
    for (int64_t piece = first; piece < end; piece++) convolve_channels(call, piece / parts, piece % parts * LANES);
}

/* Causal depthwise convolution, with SiLU behind it if has_silu.
 *
 * inputs (num_tokens, input_stride), of which the first `channels` values count, a multiple of 16. taps (kernel,
 * channels), the last one for the token itself, kernel from 2 to 8. bias (channels), or NULL. A state is
 * (channels, kernel - 1). outputs (num_tokens, channels). */
void weft_convolve(const Requests *requests, const bf16 *inputs, int64_t input_stride, int64_t channels, int64_t kernel,
                   const float *taps, const float *bias, int64_t has_silu, bf16 *outputs) {
    const Convolution call = {*requests, inputs, input_stride, channels, kernel, taps, bias, has_silu, outputs};
    run_loop(requests->num_requests * (channels / LANES), 16, convolve_pieces, &call);
}

/* ---- rows of a state ----------------------------------------------------------------------------------------- */

INLINE void widen(const bf16 *from, int64_t size, float *to) {
    for (int64_t i = 0; i < size; i += LANES) store_f32(to + i, load_bf16(from + i));
}

/* row = row * decay + input * b; returns the product of the row and c. */
INLINE float update_row(float *row, int64_t size, float decay, float input, const float *b, const float *c) {
    f32x16 sums = {0};
    for (int64_t i = 0; i < size; i += LANES) {
        const f32x16 values = load_f32(row + i) * decay + input * load_f32(b + i);
        store_f32(row + i, values);
        sums += values * load_f32(c + i);
    }
    return reduce_add(sums);
}

/* ---- state space --------------------------------------------------------------------------------------------- */

typedef struct {
    Requests requests;
    Space space;
    const bf16 *channels;
    int64_t channel_stride;
    const bf16 *times;
    int64_t time_stride;
    const bf16 *gate;
    int64_t gate_stride;
    bf16 *outputs;
} SpaceScan;

static float softplus(float value) { return value > 20.0f ? value : log1pf(expf(value)); }

/* One token of one head; state is (head_dim, state_size). */
static void scan_token(const SpaceScan *call, int64_t token, int64_t head, float *state) {
    const Space *space = &call->space;
    const int64_t dim = space->head_dim, size = space->state_size, width = space->num_heads * dim;
    const bf16 *channels = call->channels + token * call->channel_stride;
    const bf16 *selection = channels + width + head / (space->num_heads / space->num_groups) * size;
    float x[MAX_SIZE], b[MAX_SIZE], c[MAX_SIZE], sums[MAX_SIZE];
    widen(channels + head * dim, dim, x);
    widen(selection, size, b);
    widen(selection + space->num_groups * size, size, c);
    const float time = to_f32(call->times[token * call->time_stride + head]) * space->time_scale + space->time_bias[head];
    const float step = fminf(fmaxf(softplus(time), space->least_time), space->largest_time);
    const float decay = expf(step * space->decays[head]);
    for (int64_t row = 0; row < dim; row++) {
        if (row % 2 == 0) prefetch_tile(state + row * size + 2048);
        sums[row] = update_row(state + row * size, size, decay, step * x[row], b, c);
    }
    for (int64_t i = 0; i < dim; i += LANES) {
        f32x16 values = load_f32(sums + i) + load_f32(x + i) * space->skips[head];
        if (call->gate)
            values *= silu(load_bf16(call->gate + token * call->gate_stride + head * dim + i) * space->gate_scale);
        store_bf16(call->outputs + token * width + head * dim + i, values);
    }
}

static void scan_heads(const void *context, int64_t first, int64_t end) {
    const SpaceScan *call = context;
    const int64_t num_heads = call->space.num_heads, size = call->space.head_dim * call->space.state_size;
    for (int64_t piece = first; piece < end; piece++) {
        const int64_t request = piece / num_heads, head = piece % num_heads;
        float *state = state_of(&call->requests, request, num_heads * size, head * size, size);
        for (int64_t token = call->requests.starts[request]; token < call->requests.starts[request + 1]; token++)
            scan_token(call, token, head, state);
    }
}

/* The state space of Mamba 2 (Dao and Gu, 2024), as `StateSpaceScan` in engine/layers/recurrence.py describes it.
 *
 * A state is (num_heads, head_dim, state_size), both sizes multiples of 16 and at most 256. channels (num_tokens,
 * channel_stride), times (num_tokens, time_stride), gate (num_tokens, gate_stride) or NULL. */
void weft_scan_state_space(const Requests *requests, const Space *space, const bf16 *channels, int64_t channel_stride,
                           const bf16 *times, int64_t time_stride, const bf16 *gate, int64_t gate_stride, bf16 *outputs) {
    const SpaceScan call = {*requests,   *space, channels,    channel_stride, times,
                            time_stride, gate,   gate_stride, outputs};
    run_loop(requests->num_requests * space->num_heads, 1, scan_heads, &call);
}

/* ---- selective scan ------------------------------------------------------------------------------------------ */

typedef struct {
    Requests requests;
    int64_t channels, state_size;
    const float *decays, *skips;
    const bf16 *inputs;
    int64_t input_stride;
    const float *steps;
    const bf16 *b, *c;
    int64_t selection_stride;
    const bf16 *gate;
    int64_t gate_stride;
    bf16 *outputs;
} Selective;

#define CHANNELS 64 /* of a piece; the last piece may have fewer */

/* Some channels of one token; state is (num_channels, state_size). */
static void select_token(const Selective *call, int64_t token, int64_t first, int64_t num_channels, float *state) {
    const int64_t size = call->state_size;
    float x[CHANNELS], b[MAX_SIZE], c[MAX_SIZE], sums[CHANNELS];
    widen(call->inputs + token * call->input_stride + first, num_channels, x);
    widen(call->b + token * call->selection_stride, size, b);
    widen(call->c + token * call->selection_stride, size, c);
    const float *steps = call->steps + token * call->channels + first;
    for (int64_t channel = 0; channel < num_channels; channel++) {
        float *row = state + channel * size;
        const float *decays = call->decays + (first + channel) * size;
        f32x16 sum = {0};
        for (int64_t i = 0; i < size; i += LANES) {
            const f32x16 decay = vector_exp(load_f32(decays + i) * steps[channel]);
            const f32x16 values = load_f32(row + i) * decay + steps[channel] * x[channel] * load_f32(b + i);
            store_f32(row + i, values);
            sum += values * load_f32(c + i);
        }
        sums[channel] = reduce_add(sum);
    }
    for (int64_t i = 0; i < num_channels; i += LANES) {
        const f32x16 values = load_f32(sums + i) + load_f32(x + i) * load_f32(call->skips + first + i);
        const f32x16 gate = silu(load_bf16(call->gate + token * call->gate_stride + first + i));
        store_bf16(call->outputs + token * call->channels + first + i, values * gate);
    }
}

static void select_channels(const void *context, int64_t start, int64_t end) {
    const Selective *call = context;
    const int64_t parts = (call->channels + CHANNELS - 1) / CHANNELS, size = call->state_size;
    for (int64_t piece = start; piece < end; piece++) {
        const int64_t request = piece / parts, first = piece % parts * CHANNELS;
        const int64_t left = call->channels - first, num_channels = left < CHANNELS ? left : CHANNELS;
        float *state = state_of(&call->requests, request, call->channels * size, first * size, num_channels * size);
        for (int64_t token = call->requests.starts[request]; token < call->requests.starts[request + 1]; token++)
            select_token(call, token, first, num_channels, state);
    }
}

/* The selective scan of Mamba (Gu and Dao, 2023), as `SelectiveScan` in engine/layers/recurrence.py describes it.
 *
 * A state is (channels, state_size), both multiples of 16, state_size at most 256. steps (num_tokens, channels) are
 * behind softplus. inputs and gate have strides of their own; b and c share one. */
void weft_scan_selective(const Requests *requests, int64_t channels, int64_t state_size, const float *decays,
                         const float *skips, const bf16 *inputs, int64_t input_stride, const float *steps,
                         const bf16 *b, const bf16 *c, int64_t selection_stride, const bf16 *gate, int64_t gate_stride,
                         bf16 *outputs) {
    const Selective call = {*requests, channels, state_size, decays,           skips, inputs,      input_stride,
                            steps,     b,        c,          selection_stride, gate,  gate_stride, outputs};
    run_loop(requests->num_requests * ((channels + CHANNELS - 1) / CHANNELS), 1, select_channels, &call);
}

/* One token of linear attention (engine/layers/recurrence.py): each state is read once and written once. */

typedef struct {
    float *states;
    const int64_t *slots;
    const uint8_t *is_new;
    int64_t num_heads, key_dim, value_dim;
    const float *queries, *keys, *values, *decays;
    int64_t num_decays;
    const float *rates;
    float *outputs;
} DeltaStep;

/* `width` vectors of the columns of one head's state, in two passes: what it answers to the key, then the update. The
 * second pass finds in the cache what the first one read. */
INLINE void update_columns(float *state, int64_t stride, int64_t key_dim, int width, const float *query,
                           const float *key, const float *value, const float *decays, int64_t per_channel,
                           const float *rate, float *output) {
    f32x16 writes[4], outputs[4];
    for (int i = 0; i < width; i++) outputs[i] = writes[i] = (f32x16){0};
    if (rate) {
        for (int64_t row = 0; row < key_dim; row++) {
            const float factor = key[row] * decays[per_channel * row];
            for (int i = 0; i < width; i++) writes[i] += factor * load_f32(state + row * stride + i * LANES);
        }
    }
    const float scale = rate ? *rate : 1.0f;
    for (int i = 0; i < width; i++) writes[i] = scale * (load_f32(value + i * LANES) - writes[i]);
    for (int64_t row = 0; row < key_dim; row++) {
        const float decay = decays[per_channel * row];
        for (int i = 0; i < width; i++) {
            float *place = state + row * stride + i * LANES;
            const f32x16 updated = decay * load_f32(place) + key[row] * writes[i];
            store_f32(place, updated);
            outputs[i] += query[row] * updated;
        }
    }
    for (int i = 0; i < width; i++) store_f32(output + i * LANES, outputs[i]);
}

static void update_heads(const void *context, int64_t first, int64_t end) {
    const DeltaStep *call = context;
    const int64_t keys = call->key_dim, columns = call->value_dim, size = keys * columns;
    for (int64_t index = first; index < end; index++) {
        const int64_t request = index / call->num_heads, head = index % call->num_heads;
        float *state = call->states + (call->slots[request] * call->num_heads + head) * size;
        if (call->is_new[request]) memset(state, 0, size * sizeof *state);
        const float *query = call->queries + index * keys, *key = call->keys + index * keys;
        const float *value = call->values + index * columns, *decays = call->decays + index * call->num_decays;
        const float *rate = call->rates ? call->rates + index : NULL;
        const int64_t per_channel = call->num_decays > 1;
        float *output = call->outputs + index * columns;
        int64_t column = 0;
        for (; column + 4 * LANES <= columns; column += 4 * LANES)
            update_columns(state + column, columns, keys, 4, query, key, value + column, decays, per_channel, rate,
                           output + column);
        for (; column < columns; column += LANES)
            update_columns(state + column, columns, keys, 1, query, key, value + column, decays, per_channel, rate,
                           output + column);
    }
}

/* Update the states (num_slots, num_heads, key_dim, value_dim) of requests in place.
 *
 * slots (num_requests): where each request's state is; is_new (num_requests): it counts as zero.
 * queries, keys (num_requests, num_heads, key_dim); values, outputs (num_requests, num_heads, value_dim), value_dim a
 * multiple of 16. decays (num_requests, num_heads, num_decays), num_decays 1 or key_dim. rates (num_requests,
 * num_heads), or NULL for states that are not asked first. */
void weft_delta_step(float *states, const int64_t *slots, const uint8_t *is_new, int64_t num_requests,
                     int64_t num_heads, int64_t key_dim, int64_t value_dim, const float *queries, const float *keys,
                     const float *values, const float *decays, int64_t num_decays, const float *rates,
                     float *outputs) {
    const DeltaStep call = {states,  slots, is_new, num_heads, key_dim, value_dim, queries, keys,
                        values, decays, num_decays, rates, outputs};
    run_loop(num_requests * num_heads, 1, update_heads, &call);
}
