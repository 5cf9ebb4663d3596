/* Memory that a kernel keeps between calls. Kernels are called from one thread at a time, so one of each is enough. */
#ifndef WEFT_SCRATCH_H
#define WEFT_SCRATCH_H

#include <stdlib.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

typedef struct {
    void *memory;
    size_t num_bytes;
} Scratch;

/* At least num_bytes, aligned to cache lines, in huge pages where that is possible. Growing loses what was there. */
static inline void *scratch_reserve(Scratch *scratch, size_t num_bytes) {
    if (num_bytes > scratch->num_bytes) {
        free(scratch->memory);
        const size_t page = num_bytes < (1 << 20) ? 4096 : 2 << 20;
        num_bytes = (num_bytes + page - 1) / page * page;
        scratch->memory = aligned_alloc(page, num_bytes);
        if (!scratch->memory) abort(); /* as torch does; the operating system gives memory before it has it */
#if defined(MADV_HUGEPAGE)
        if (page > 4096) madvise(scratch->memory, num_bytes, MADV_HUGEPAGE);
#endif
        scratch->num_bytes = num_bytes;
    }
    return scratch->memory;
}

#endif
