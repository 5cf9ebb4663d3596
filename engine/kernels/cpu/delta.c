/* One token of linear attention (engine/layers/recurrence.py): each state is read once and written once. */
#include "pool.h"
#include "vectors.h"

typedef struct {
    float *states;
    const int64_t *slots;
    const uint8_t *is_new;
    int64_t num_heads, key_dim, value_dim;
    const float *queries, *keys, *values, *decays;
    int64_t num_decays;
    const float *rates;
    float *outputs;
} Delta;

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
    const Delta *call = context;
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
    const Delta call = {states,  slots, is_new, num_heads, key_dim, value_dim, queries, keys,
                        values, decays, num_decays, rates, outputs};
    run_loop(num_requests * num_heads, 1, update_heads, &call);
}
