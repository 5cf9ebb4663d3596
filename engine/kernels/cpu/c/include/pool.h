/* A pool of threads that share the work of a call.
 *
 * A call ends when its work is done, even if some threads never took part. Other programs run on the same cores and may
 * keep a thread from running. Such a thread delays a call only if it holds a piece of the work. At a barrier, as in
 * OpenMP, all threads would wait for it, about 200 times a step.
 */
#ifndef WEFT_POOL_H
#define WEFT_POOL_H


#include <stdint.h>

#pragma GCC visibility push(hidden) /* each shared object has its own threads */

/* What a thread does in a call: it takes pieces until none are left. Thread 0 is the caller. */
typedef void Body(void *context, int thread);

/* Computes the pieces [first, end). */
typedef void Loop(const void *context, int64_t first, int64_t end);

/* The most threads that take part, as set by `weft_set_num_threads`. */
int num_threads(void);

/* Run body on the caller and on every thread that arrives before the caller is done. One call at a time. */
void run_on_all(Body *body, void *context);

/* Divide the pieces into a range for every thread. Must come before `run_on_all`. */
void deal_pieces(int64_t num_pieces);

/* The next piece of the thread's range, or of another range if that is empty; -1 if all pieces are taken. */
int64_t take_piece(int thread);

/* Run a loop over all pieces on the threads, `grain` pieces at a time. */
void run_loop(int64_t num_pieces, int64_t grain, Loop *loop, const void *context);

#pragma GCC visibility pop

/* Fewest rows that are worth handing to another thread. */
static inline int64_t grain(int64_t row_values) { return (1 << 14) / row_values + 1; }

/* Memory that a kernel keeps between calls. Calls come from one thread at a time, so each kernel needs only one. */

#include <stdlib.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

typedef struct {
    void *memory;
    size_t num_bytes;
} Scratch;

/* At least num_bytes, aligned to cache lines, in huge pages if possible. Growing loses the contents. */
static inline void *scratch_reserve(Scratch *scratch, size_t num_bytes) {
    if (num_bytes > scratch->num_bytes) {
        free(scratch->memory);
        const size_t page = num_bytes < (1 << 20) ? 4096 : 2 << 20;
        num_bytes = (num_bytes + page - 1) / page * page;
        scratch->memory = aligned_alloc(page, num_bytes);
        if (!scratch->memory) abort(); /* like torch; Linux overcommits, so this hardly happens */
#if defined(MADV_HUGEPAGE)
        if (page > 4096) madvise(scratch->memory, num_bytes, MADV_HUGEPAGE);
#endif
        scratch->num_bytes = num_bytes;
    }
    return scratch->memory;
}

#endif
