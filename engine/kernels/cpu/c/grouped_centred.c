/* Units of integers in groups without an offset, whose weights have a centre: a function for each form. */
#include "grouped_unit.h"

#if defined(__AVX2__)

enum { HAS_OFFSET = 0 };

FORMS(FUNCTION)

void compute_centred_unit(const Job *job, const Unit *unit) {
    switch (job->form) { FORMS(CASE) }
}

#endif
