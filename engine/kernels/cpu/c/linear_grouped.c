/* Linear layers over small integers in groups, which grouped_layout.h describes. */
#include "grouped_unit.h"

size_t rounded_bytes(const Job *job) {
    return (size_t)(padded_rows(job) * row_bytes(padded_inputs(job->k), read_form(job->form)) + 63) / 64 * 64;
}

typedef struct {
    const bf16 *inputs; /* (rows, stride) */
    int64_t rows, stride, k, padded_k;
    Form form;
    int64_t tile;
    char *to;
} Rounding;

/* Round LANES inputs; returns the whole numbers. */
INLINE f32x16 round_inputs(f32x16 values, float inverse, int8_t *to) {
    const f32x16 shifted = values * splat(inverse) + splat(12582912.0f); /* 1.5 * 2^23: adding it rounds */
#if defined(__AVX512F__)
    _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8((__m512i)shifted)); /* GCC converts lane by lane */
#else
    const i8x16 bytes = __builtin_convertvector((i32x16)shifted, i8x16);
    memcpy(to, &bytes, sizeof bytes);
#endif
    return shifted - splat(12582912.0f);
}

static void round_rows(const void *context, int64_t first, int64_t end) {
    const Rounding *call = context;
    const Form form = call->form;
    const int64_t tile = call->tile;
    for (int64_t row = first; row < end; row++) {
        const bf16 *from = call->inputs + row * call->stride;
        char *to = call->to + row / tile * tile * row_bytes(call->padded_k, form);
        for (int64_t input = 0; input < call->padded_k; input += form.group, to += tile * group_bytes(form)) {
            int8_t *values = (int8_t *)to + row % tile * form.group;
            float *scale = (float *)(to + tile * form.group) + row % tile;
            Start *start = (Start *)(scale + tile);
            bf16 last[2 * LANES] = {0};
            const bf16 *group = from + input;
            const int64_t left = row < call->rows ? call->k - input : 0;
            if (left < form.group) group = left > 0 ? memcpy(last, group, (size_t)left * sizeof(bf16)) : last;
            const f32x16 low = load_bf16(group), high = form.group > LANES ? load_bf16(group + LANES) : splat(0.0f);
            const float largest = reduce_max(larger(larger(low, -low), larger(high, -high)));
            const float inverse = largest > 0x1p-100f ? 127.0f / largest : 0.0f;
            f32x16 rounded = round_inputs(low, inverse, values);
            if (form.group > LANES) rounded += round_inputs(high, inverse, values + LANES);
            const float sum = reduce_add(rounded);
            *scale = sum == sum ? largest / 127.0f : sum; /* what is no number stays none, for all outputs */
            if (form.has_offset)
                start->real = sum * *scale;
            else
                start->whole = BASE - (sum == sum ? (int32_t)sum * (1 << (form.bits - 1)) : 0);
        }
    }
}

void give_rounded(Job *job, const bf16 *inputs, void *memory) {
    const Rounding call = {inputs, job->rows, job->input_stride, job->k, job->padded_k, read_form(job->form),
                           rows_of_tile(job), memory};
    run_loop(padded_rows(job), 4, round_rows, &call);
    job->inputs = memory;
}

#if !defined(__AVX2__)
UNIT_FUNCTION(any, read_form(job->form))
#endif

void compute_grouped_unit(const Job *job, const Unit *unit, int thread) {
    (void)thread;
#if !defined(__AVX2__)
    compute_any(job, unit);
#else
    if (read_form(job->form).has_offset)
        compute_offset_unit(job, unit);
    else
        compute_centred_unit(job, unit);
#endif
}

/* `plan_job` for weights in groups; job.form is set. */
void plan_grouped_job(Job *job) {
    const Form form = read_form(job->form);
    plan_job(job);
    job->padded_k = padded_inputs(job->k);
    job->panel_bytes = job->padded_k / STEP * step_bytes(form);
}

/* Like `weft_linear`, with weights from `weft_pack_linear_grouped` and a factor for each output, padded to panels. */
void weft_linear_grouped(const bf16 *inputs, int64_t input_stride, int64_t rows, int64_t k, const char *weights,
                         const float *factors, int64_t form, int64_t n, const bf16 *bias, void *outputs,
                         int64_t output_stride, int64_t epilogue) {
    static Scratch scratch;
    Job job = {.rows = rows, .input_stride = input_stride, .k = k, .weights = weights, .scales = factors, .form = form,
               .bias = bias, .n = n, .outputs = outputs, .output_stride = output_stride, .epilogue = (Epilogue)epilogue};
    plan_grouped_job(&job);
    give_rounded(&job, inputs, scratch_reserve(&scratch, rounded_bytes(&job)));
    run_jobs(&job, 1, compute_grouped_unit);
}
