/* What the linear kernels share: the division of outputs among threads, and the epilogues.
 *
 * Weights are packed in panels of 16 outputs, and a unit is four panels. For few rows the panels of a unit are far apart,
 * because memory serves four long streams faster than one. For many rows they are neighbours, so that whole cache lines
 * of outputs are written. Each thread has a range of units, whose streams continue from unit to unit. When its own range
 * is done, it takes units of other threads.
 */
#ifndef WEFT_LINEAR_JOB_H
#define WEFT_LINEAR_JOB_H

#include "kernels.h"
#include "pairs.h"
#include "pool.h"
#include "tiles.h"

enum { PANEL = LANES, TILE_K = 32, BLOCK_ROWS = 32, UNIT_PANELS = 4, BLOCK_COLUMNS = UNIT_PANELS * PANEL };
enum { CHUNK_BYTES = 1 << 19 }; /* inputs that stay in the second-level cache while panels are read */
enum { FEW_ROWS = 16 };          /* up to this many rows, memory bandwidth is the limit */

typedef struct {
    const Input *inputs; /* (rows, input_stride) */
    int64_t rows, input_stride, k, padded_k;
    const void *weights;
    int64_t panel_bytes;
    const float *scales; /* (n, padded to whole panels) factor of each output, or NULL */
    int64_t form;        /* of weights in groups: see grouped_layout.h */
    const bf16 *bias;    /* (n) or NULL */
    int64_t n;
    void *outputs; /* (rows, output_stride) */
    int64_t output_stride;
    Epilogue epilogue;
    Gate gate; /* of GATED_SWISH */
    int64_t columns, unit_columns; /* panels of outputs, in total and in a unit */
    int64_t column_step, unit_step; /* distance between the columns of a unit, and between units */
    int64_t units_per_chunk, chunk_rows, num_units;
    int64_t first_unit; /* among those of all jobs of a call */
    int64_t tile_bytes, row_bytes; /* AMX: distance between the tiles of a row of inputs, and between rows of a tile */
} Job;

/* Rows [row, row + rows) of the columns `column`, `column + job.column_step`, ..., and the panels for them. */
typedef struct {
    int64_t row, rows, column, columns;
    const char *panels[UNIT_PANELS];
} Unit;

/* Divide the job, whose fields up to `epilogue` are set, apart from those set here. */
static inline void plan_job(Job *job) {
    job->padded_k = (job->k + TILE_K - 1) / TILE_K * TILE_K;
    job->panel_bytes = PANEL * job->padded_k * (int64_t)sizeof(bf16);
    job->columns = (job->n + PANEL - 1) / PANEL;
    job->unit_columns = job->epilogue >= GATED_SILU ? UNIT_PANELS / 2 : UNIT_PANELS;
    job->units_per_chunk = (job->columns + job->unit_columns - 1) / job->unit_columns;
    const int is_far = job->rows <= FEW_ROWS;
    job->column_step = is_far ? job->units_per_chunk : 1;
    job->unit_step = is_far ? 1 : job->unit_columns;
    job->chunk_rows = CHUNK_BYTES / (job->padded_k * (int64_t)sizeof(Input)) / BLOCK_ROWS * BLOCK_ROWS;
    if (job->chunk_rows < BLOCK_ROWS) job->chunk_rows = BLOCK_ROWS;
    job->num_units = job->units_per_chunk * ((job->rows + job->chunk_rows - 1) / job->chunk_rows);
}

/* A unit at the end may have fewer columns. It computes its first panel again in their place, and drops the results. */
static inline Unit unit_at(const Job *job, int64_t index) {
    Unit unit = {.row = index / job->units_per_chunk * job->chunk_rows,
                 .column = index % job->units_per_chunk * job->unit_step};
    unit.rows = job->rows - unit.row < job->chunk_rows ? job->rows - unit.row : job->chunk_rows;
    unit.columns = (job->columns - unit.column + job->column_step - 1) / job->column_step;
    for (int64_t p = 0; p < UNIT_PANELS; p++) {
        const int64_t place = p % job->unit_columns < unit.columns ? p % job->unit_columns : 0;
        const int64_t panel = unit.column + place * job->column_step + p / job->unit_columns * job->columns;
        unit.panels[p] = (const char *)job->weights + panel * job->panel_bytes;
    }
    return unit;
}

/* Apply the epilogue to 16 sums; bias may be NULL. */
INLINE void finish_lanes(Epilogue epilogue, f32x16 values, const bf16 *bias, void *to) {
    if (bias) values += load_bf16(bias);
    if (epilogue == ADD_BF16) values += load_bf16(to);
    if (epilogue == STORE_GELU) values = gelu(values);
    if (epilogue == STORE_F32)
        store_f32(to, values);
    else
        store_bf16(to, values);
}

/* The same at the end of a row, for fewer outputs than lanes. */
static inline void finish_some(Epilogue epilogue, f32x16 values, const bf16 *bias, void *to, size_t count) {
    float whole[LANES] = {0};
    bf16 whole_bias[LANES] = {0};
    const size_t num_bytes = count * (epilogue == STORE_F32 ? sizeof(float) : sizeof(bf16));
    memcpy(whole, to, num_bytes);
    if (bias) memcpy(whole_bias, bias, count * sizeof(bf16));
    finish_lanes(epilogue, values, whole_bias, whole);
    memcpy(to, whole, num_bytes);
}

INLINE f32x16 scaled(const Job *job, f32x16 values, int64_t output) {
    return job->scales ? values * load_f32(job->scales + output) : values;
}

/* silu(gate) * up, or its variants; bias is that of the gate or NULL, and that of up lies n values behind it. */
INLINE f32x16 join_gate(const Job *job, f32x16 gate, f32x16 up, const bf16 *bias) {
    if (job->epilogue != GATED_SWISH) return activated(job->epilogue, gate) * up;
    if (bias) {
        gate += load_bf16(bias);
        up += load_bf16(bias + job->n);
    }
    const f32x16 limit = splat(job->gate.limit);
    gate = smaller(gate, limit);
    up = larger(smaller(up, limit), -limit);
    const f32x16 steepness = job->gate.slope * (1.0f + job->gate.cubic * gate * gate);
    return gate / (1.0f + vector_exp(-steepness * gate)) * (up + job->gate.offset);
}

/* Write the sums (rows, BLOCK_COLUMNS) of a unit's rows from `row` on to the outputs. */
static inline void finish_block(const Job *job, const Unit *unit, int64_t row, int64_t rows, const float *sums) {
    const int64_t size = job->epilogue == STORE_F32 ? sizeof(float) : sizeof(bf16);
    for (int64_t c = 0; c < unit->columns && c < job->unit_columns; c++) {
        const int64_t first = (unit->column + c * job->column_step) * PANEL, left = job->n - first;
        const bf16 *bias = job->bias ? job->bias + first : NULL, *bias_after = job->epilogue >= GATED_SILU ? NULL : bias;
        const float *from = sums + c * PANEL;
        char *to = (char *)job->outputs + (row * job->output_stride + first) * size;
        for (int64_t r = 0; r < rows; r++, from += BLOCK_COLUMNS, to += job->output_stride * size) {
            f32x16 values = scaled(job, load_f32(from), first);
            if (job->epilogue >= GATED_SILU) {
                const f32x16 up = load_f32(from + UNIT_PANELS / 2 * PANEL);
                values = join_gate(job, values, scaled(job, up, job->columns * PANEL + first), bias);
            }
            if (left >= PANEL)
                finish_lanes(job->epilogue, values, bias_after, to);
            else
                finish_some(job->epilogue, values, bias_after, to, (size_t)left);
        }
    }
}

#if defined(__AMX_BF16__)

typedef struct {
    const Job *job;
    bf16 *tiles;
} TileInputs;

/* Inputs as tiles of 16 rows x 32 values, padded with zeros: [rows / 16][k / 32][16][32]. */
static void tile_inputs(const void *context, int64_t first, int64_t end) {
    const TileInputs *call = context;
    const Job *job = call->job;
    for (int64_t row = first; row < end; row++) {
        const bf16 *from = job->inputs + row * job->input_stride;
        bf16 *to = call->tiles + row / TILE_ROWS * TILE_ROWS * job->padded_k + row % TILE_ROWS * TILE_K;
        for (int64_t start = 0; start < job->padded_k; start += TILE_K, to += TILE_VALUES) {
            const int64_t left = row < job->rows ? job->k - start : 0;
            if (left >= TILE_K) {
                memcpy(to, from + start, TILE_K * sizeof(bf16));
            } else {
                memset(to, 0, TILE_K * sizeof(bf16));
                if (left > 0) memcpy(to, from + start, (size_t)left * sizeof(bf16));
            }
        }
    }
}

#endif

/* The loop in which threads compute the units of one job, or of several that share a kind of weights and inputs of k. */

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
