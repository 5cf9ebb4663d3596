/* The loop in which threads compute the units of one job, or of several that share a kind of weights and inputs of k. */
#ifndef WEFT_LINEAR_RUN_H
#define WEFT_LINEAR_RUN_H

#include "linear_job.h"

typedef void ComputeUnit(const Job *job, const Unit *unit, int thread);

#pragma GCC visibility push(hidden)

/* Compute a unit from its packed weights: bfloat16, or integers in groups, whose jobs are planned and get their inputs in
 * a way of their own. */
ComputeUnit compute_unit, compute_grouped_unit;

void plan_grouped_job(Job *job);

/* Inputs that share a scale. */
static inline int64_t group_of_form(int64_t form) { return form >> 8 & 0xff; }

/* Bytes that `give_rounded` needs for a job. */
size_t rounded_bytes(const Job *job);

void give_rounded(Job *job, const bf16 *inputs, void *memory);

#pragma GCC visibility pop

typedef struct {
    const Job *jobs;
    int64_t num_jobs;
    ComputeUnit *compute_unit;
} RunJobs;

static void run_units(void *context, int thread) {
    const RunJobs *call = context;
    const Job *job = NULL;
    for (int64_t index = take_piece(thread); index >= 0; index = take_piece(thread)) {
        if (!job || index < job->first_unit || index >= job->first_unit + job->num_units) {
            for (job = call->jobs; index >= job->first_unit + job->num_units;) job++;
#if defined(__AMX_BF16__)
            if (job->form)
                shape_group_tiles(group_of_form(job->form));
            else
                shape_tiles(job->rows <= FEW_ROWS ? job->rows : TILE_ROWS);
#endif
        }
        const Unit unit = unit_at(job, index - job->first_unit);
        call->compute_unit(job, &unit, thread);
    }
    close_tiles();
}

/* Compute all units of jobs, in one call of the pool. Each was divided by `plan_job` and has its inputs. */
static void run_jobs(Job *jobs, int64_t num_jobs, ComputeUnit *compute) {
    int64_t num_units = 0;
    for (Job *job = jobs; job < jobs + num_jobs; job++) {
        job->first_unit = num_units;
        num_units += job->num_units;
    }
    RunJobs run = {jobs, num_jobs, compute};
    deal_pieces(num_units);
    run_on_all(run_units, &run);
}

#if defined(__AMX_BF16__)

/* Bytes that `give_inputs` needs for a job. */
static size_t input_bytes(const Job *job) {
    const int64_t padded_rows = (job->rows + BLOCK_ROWS - 1) / BLOCK_ROWS * BLOCK_ROWS;
    return (size_t)(padded_rows * job->padded_k) * sizeof(bf16);
}

/* Give a job its inputs (job.rows, job.input_stride), if need be as tiles in `memory`. */
static void give_inputs(Job *job, const bf16 *inputs, void *memory) {
    job->inputs = inputs;
    const int are_tiles = job->rows <= FEW_ROWS && job->k == job->padded_k; /* inputs can be loaded with a stride */
    job->tile_bytes = are_tiles ? TILE_K * sizeof(bf16) : TILE_VALUES * sizeof(bf16);
    job->row_bytes = (are_tiles ? job->input_stride : TILE_K) * (int64_t)sizeof(bf16);
    if (are_tiles) return;
    const TileInputs call = {job, memory};
    run_loop((job->rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS, TILE_ROWS, tile_inputs, &call);
    job->inputs = call.tiles;
}

#elif defined(__AVX512BF16__)

static size_t input_bytes(const Job *job) {
    (void)job;
    return 0;
}

static void give_inputs(Job *job, const bf16 *inputs, void *memory) {
    (void)memory;
    job->inputs = inputs;
}

#else

typedef struct {
    const bf16 *inputs; /* (rows, stride) */
    int64_t stride, k;
    float *to; /* (rows, k) */
} Widening;

static void widen_rows(const void *context, int64_t first, int64_t end) {
    const Widening *call = context;
    for (int64_t row = first; row < end; row++)
        copy_inputs(call->to + row * call->k, call->inputs + row * call->stride, call->k);
}

/* Bytes that `give_inputs` needs for a job. */
static size_t input_bytes(const Job *job) { return (size_t)(job->rows * job->k) * sizeof(float); }

/* Give a job its inputs (job.rows, job.input_stride), widened in `memory`. */
static void give_inputs(Job *job, const bf16 *inputs, void *memory) {
    const Widening call = {inputs, job->input_stride, job->k, memory};
    run_loop(job->rows, 16, widen_rows, &call);
    job->inputs = call.to;
    job->input_stride = job->k;
}

#endif

/* Run one job that `plan_job` has divided; inputs are (job.rows, job.input_stride). */
static inline void run_job(Job *job, const bf16 *inputs, ComputeUnit *compute) {
    static Scratch scratch;
    give_inputs(job, inputs, scratch_reserve(&scratch, input_bytes(job)));
    run_jobs(job, 1, compute);
}

#endif
