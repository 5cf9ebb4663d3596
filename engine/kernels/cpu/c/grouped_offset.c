/* Units of integers in groups with an offset: a function for each form. */
#include "grouped_unit.h"

#if defined(__AVX2__)

enum { HAS_OFFSET = 1 };

FORMS(FUNCTION)

void compute_offset_unit(const Job *job, const Unit *unit) {
    switch (job->form) { FORMS(CASE) }
}

#endif
