/* Runs once, after loading: asks the kernel for what the instruction set needs. */
#include "tiles.h"

#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>

enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };

int weft_initialise(void) { return (int)syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA); }
#else
int weft_initialise(void) { return 0; }
#endif
