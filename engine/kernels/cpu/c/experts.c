/* A layer of experts: each row goes through the few gated feed-forward networks that were chosen for it.
 *
 * Rows are sorted by expert, so that the weights of an expert are read once for all its rows, and no others are read.
 * Both products of all experts take one call of the pool each. The bits of a row depend on no other row: each product
 * sums over k in its own order, and the experts of a row are added in the order in which they were chosen.
 */
#include "linear_job.h"

enum { MAX_PAIRS = 1 << 14 }; /* of a row and an expert in one pass, which limits the memory between the products */

/* Mirrored in engine/kernels/cpu/products.py. */
typedef struct {
    Matrix gate_up, down;
    int64_t num_experts;
    Gate gate;
    int32_t is_plain; /* silu(gate) * up, without biases or limits */
} Experts;

/* Pairs of a row and an expert, in the order of their experts. */
typedef struct {
    int64_t num_pairs;
    int64_t *starts; /* (num_experts + 1) the first pair of each expert */
    int64_t *rows;   /* (num_pairs) */
    int64_t *places; /* (rows, chosen) where each pair is */
} Pairs;

static Pairs sort_pairs(const int64_t *ids, int64_t rows, int64_t chosen, int64_t num_experts) {
    static Scratch scratch;
    const int64_t num_pairs = rows * chosen;
    int64_t *memory = scratch_reserve(&scratch, (size_t)(num_experts + 2 + 2 * num_pairs) * sizeof(int64_t));
    Pairs pairs = {num_pairs, memory, memory + num_experts + 2, memory + num_experts + 2 + num_pairs};
    int64_t *ends = pairs.starts + 1; /* these grow from the starts to the ends while pairs are placed */
    memset(pairs.starts, 0, (size_t)(num_experts + 2) * sizeof(int64_t));
    for (int64_t pair = 0; pair < num_pairs; pair++) ends[ids[pair] + 1]++;
    for (int64_t expert = 0; expert < num_experts; expert++) ends[expert + 1] += ends[expert];
    for (int64_t pair = 0; pair < num_pairs; pair++) {
        const int64_t place = ends[ids[pair]]++;
        pairs.rows[place] = pair / chosen;
        pairs.places[pair] = place;
    }
    return pairs;
}

typedef struct {
    const bf16 *inputs;
    int64_t input_stride, size;
    const int64_t *rows;
    bf16 *to; /* (num_pairs, size) */
} Gathering;

static void gather_inputs(const void *context, int64_t first, int64_t end) {
    const Gathering *call = context;
    for (int64_t pair = first; pair < end; pair++)
        memcpy(call->to + pair * call->size, call->inputs + call->rows[pair] * call->input_stride,
               (size_t)call->size * sizeof(bf16));
}

/* outputs (num_pairs, matrix.outputs) = epilogue of inputs (num_pairs, matrix.inputs) times each pair's own matrix. */
static void multiply(const Matrix *matrix, const Pairs *pairs, int64_t num_experts, const bf16 *inputs,
                     bf16 *outputs, Epilogue epilogue, Gate gate) {
    static Scratch job_scratch, input_scratch;
    Job *jobs = scratch_reserve(&job_scratch, (size_t)num_experts * sizeof(Job));
    int64_t num_jobs = 0;
    size_t num_bytes = 0;
    const int64_t parts = epilogue >= GATED_SILU ? 2 : 1, k = matrix->inputs, n = matrix->outputs;
    const int64_t padded_n = parts * ((n + PANEL - 1) / PANEL * PANEL);
    for (int64_t expert = 0; expert < num_experts; expert++) {
        const int64_t start = pairs->starts[expert], rows = pairs->starts[expert + 1] - start;
        if (!rows) continue;
        Job *job = &jobs[num_jobs++];
        *job = (Job){.rows = rows, .input_stride = k, .k = k, .n = n, .form = matrix->form, .outputs = outputs + start * n,
                     .output_stride = n, .epilogue = epilogue, .gate = gate,
                     .scales = matrix->scales ? matrix->scales + expert * padded_n : NULL,
                     .bias = matrix->bias ? matrix->bias + expert * parts * n : NULL};
        if (matrix->form)
            plan_grouped_job(job);
        else
            plan_job(job);
        job->weights = (const char *)matrix->weights + expert * padded_n / PANEL * job->panel_bytes;
        num_bytes += matrix->form ? rounded_bytes(job) : input_bytes(job);
    }
    char *memory = scratch_reserve(&input_scratch, num_bytes);
    for (Job *job = jobs; job < jobs + num_jobs; job++) {
        /* They depend on the stride that `give_inputs` changes. */
        const size_t job_bytes = matrix->form ? rounded_bytes(job) : input_bytes(job);
        if (matrix->form)
            give_rounded(job, inputs, memory);
        else
            give_inputs(job, inputs, memory);
        inputs += job->rows * k;
        memory += job_bytes;
    }
    run_jobs(jobs, num_jobs, matrix->form ? compute_grouped_unit : compute_unit);
}

typedef struct {
    const bf16 *from; /* (num_pairs, size) */
    const int64_t *places;
    const float *shares; /* (rows, chosen) */
    int64_t chosen, size;
    bf16 *to; /* (rows, stride) */
    int64_t stride;
} Mixing;

static void mix_rows(const void *context, int64_t first, int64_t end) {
    const Mixing *call = context;
    for (int64_t row = first; row < end; row++) {
        const int64_t *places = call->places + row * call->chosen;
        const float *shares = call->shares + row * call->chosen;
        for (int64_t i = 0; i < call->size; i += LANES) {
            f32x16 sum = {0};
            for (int64_t c = 0; c < call->chosen; c++)
                sum += shares[c] * load_bf16(call->from + places[c] * call->size + i);
            bf16 *to = call->to + row * call->stride + i;
            store_bf16(to, load_bf16(to) + sum);
        }
    }
}

static void run_rows(const Experts *experts, const bf16 *inputs, int64_t input_stride, int64_t rows, const int64_t *ids,
                     const float *shares, int64_t chosen, bf16 *residual, int64_t residual_stride) {
    static Scratch scratch;
    const Matrix *gate_up = &experts->gate_up, *down = &experts->down;
    const Pairs pairs = sort_pairs(ids, rows, chosen, experts->num_experts);
    const int64_t size = gate_up->inputs, wide = (pairs.num_pairs * size + 31) / 32 * 32;
    bf16 *gathered = scratch_reserve(&scratch, (size_t)(wide + pairs.num_pairs * gate_up->outputs) * sizeof(bf16));
    bf16 *inner = gathered + wide;
    const Gathering gathering = {inputs, input_stride, size, pairs.rows, gathered};
    run_loop(pairs.num_pairs, grain(size), gather_inputs, &gathering);
    multiply(gate_up, &pairs, experts->num_experts, gathered, inner, experts->is_plain ? GATED_SILU : GATED_SWISH,
             experts->gate);
    multiply(down, &pairs, experts->num_experts, inner, gathered, STORE_BF16, experts->gate);
    const Mixing mixing = {gathered, pairs.places, shares, chosen, size, residual, residual_stride};
    run_loop(rows, grain(chosen * size), mix_rows, &mixing);
}

/* Add to each row of residual (rows, residual_stride) the outputs of its experts, each times its share.
 *
 * inputs (rows, input_stride); ids and shares (rows, chosen). The size of a row, which is a multiple of 16, is that of
 * the inputs of gate_up and of the outputs of down. With biases, the inner size is a multiple of 16, too. */
void weft_experts(const Experts *experts, const bf16 *inputs, int64_t input_stride, int64_t rows, const int64_t *ids,
                  const float *shares, int64_t chosen, bf16 *residual, int64_t residual_stride) {
    const int64_t most = MAX_PAIRS / chosen;
    for (int64_t row = 0; row < rows; row += most) {
        const int64_t left = rows - row < most ? rows - row : most;
        run_rows(experts, inputs + row * input_stride, input_stride, left, ids + row * chosen, shares + row * chosen,
                 chosen, residual + row * residual_stride, residual_stride);
    }
}
