/* Runs once after loading: asks the operating system for permission to use AMX tiles. Knows the source, too. */
#include "tiles.h"

#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>

enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };

int weft_initialise(void) { return (int)syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA); }
#else
int weft_initialise(void) { return 0; }
#endif

/* The source that this was compiled from (`source_digest` in variants.py): callers of another one pass other arguments. */
const char *weft_source(void) { return WEFT_SOURCE; }
