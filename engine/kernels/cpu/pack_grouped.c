/* Packs integers in groups, and unpacks some outputs: see grouped_layout.h. */
#include "grouped_layout.h"

typedef struct {
    const uint8_t *values;           /* (n, k) */
    const uint16_t *scales, *offsets; /* (n, k / group) in half precision; offsets may be NULL */
    int64_t n, k;
    Form form;
    char *packed;
} Packing;

/* Add bits to the quad at a place of a panel. */
INLINE void add_bits(char *to, uint32_t bits, int shift) {
    uint32_t quad;
    memcpy(&quad, to, sizeof quad);
    quad |= bits << shift;
    memcpy(to, &quad, sizeof quad);
}

/* The inputs of a group, quad by quad. */
static void pack_group(const Packing *call, int64_t row, int64_t num_rows, int64_t input, char *panel) {
    const Form form = call->form;
    for (int64_t end = input + form.group; input < end; input += 4) {
        for (int64_t r = 0; r < num_rows; r++) {
            int shift;
            uint32_t quad;
            memcpy(&quad, call->values + (row + r) * call->k + input, sizeof quad);
            char *to = panel + place_of(form, r, input, &shift);
            add_bits(to, form.bits == 6 ? quad & 0x0f0f0f0f : quad, shift);
            if (form.bits != 6) continue;
            to = panel + upper_place_of(form, r, input, &shift);
            add_bits(to, quad >> 4 & 0x03030303, shift);
        }
    }
}

static void pack_panels(const void *context, int64_t first, int64_t end) {
    const Packing *call = context;
    const Form form = call->form;
    const int64_t panel_bytes = padded_inputs(call->k) / STEP * step_bytes(form), num_groups = call->k / form.group;
    for (int64_t row = first * PANEL; row < end * PANEL; row += PANEL) {
        char *panel = call->packed + row / PANEL * panel_bytes;
        const int64_t num_rows = call->n - row < PANEL ? call->n - row : PANEL;
        for (int64_t g = 0; g < num_groups; g++) {
            const int64_t input = g * form.group;
            pack_group(call, row, num_rows, input, panel);
            for (int64_t r = 0; r < num_rows; r++) {
                const int64_t from = (row + r) * num_groups + g;
                char *to = panel + scale_place(form, r, input);
                memcpy(to, call->scales + from, sizeof(uint16_t));
                if (call->offsets) memcpy(to + scale_bytes(form), call->offsets + from, sizeof(uint16_t));
            }
        }
    }
}

/* Pack integers (n, k) and their scales and offsets, k a multiple of the group, into packed, which must be zero before. */
void weft_pack_linear_grouped(const uint8_t *values, const uint16_t *scales, const uint16_t *offsets, int64_t n, int64_t k,
                              int64_t form, char *packed) {
    const Packing call = {values, scales, offsets, n, k, read_form(form), packed};
    run_loop((n + PANEL - 1) / PANEL, 1, pack_panels, &call);
}

typedef struct {
    const char *packed;
    const float *factors;
    int64_t k;
    Form form;
    const int64_t *ids;
    bf16 *to;
} Gathering;

static void gather_rows(const void *context, int64_t first, int64_t end) {
    const Gathering *call = context;
    const Form form = call->form;
    const int64_t panel_bytes = padded_inputs(call->k) / STEP * step_bytes(form);
    const float centre = form.has_offset ? 0.0f : (float)(1 << (form.bits - 1));
    for (int64_t row = first; row < end; row++) {
        const int64_t id = call->ids[row];
        const char *panel = call->packed + id / PANEL * panel_bytes;
        for (int64_t i = 0; i < call->k; i++) {
            int shift;
            uint16_t halves[2] = {0};
            const char *at = panel + scale_place(form, id % PANEL, i);
            memcpy(halves, at, sizeof(uint16_t));
            if (form.has_offset) memcpy(halves + 1, at + scale_bytes(form), sizeof(uint16_t));
            const uint8_t byte = (uint8_t)panel[place_of(form, id % PANEL, i, &shift)];
            int q = byte >> shift & (form.bits == 8 ? 255 : 15);
            if (form.bits == 6) q |= ((uint8_t)panel[upper_place_of(form, id % PANEL, i, &shift)] >> shift & 3) << 4;
            const float value = half_to_f32(halves[0]) * ((float)q - centre) - half_to_f32(halves[1]);
            call->to[row * call->k + i] = from_f32(value * call->factors[id]);
        }
    }
}

/* Unpack some outputs: rows `ids` of the packed matrix as (num_ids, k). */
void weft_gather_rows_grouped(const char *packed, const float *factors, int64_t form, int64_t k, const int64_t *ids,
                              int64_t num_ids, bf16 *to) {
    const Gathering call = {packed, factors, k, read_form(form), ids, to};
    run_loop(num_ids, 32, gather_rows, &call);
}
