"""Keeps the most tokens of a step: halved after a step runs out of memory, doubled again later.

Whatever took the memory may be gone later: another process on the device, or an unusual batch. So the budget is doubled
after many steps that needed it and succeeded. It never exceeds the configured one. A failed step ends its requests, so
each failure doubles the number of steps to wait. As many good steps with the whole budget halve that number again.
"""

import logging

logger = logging.getLogger(__name__)

FIRST_TRIAL, LONGEST_TRIAL = 256, 1 << 14
"""Steps that must succeed before the budget grows again: after the first failure, and at most."""


class TokenBudget:
    """Owned by the scheduler, which reads `max_num_tokens`. The engine reports how steps ended."""

    def __init__(self, configured: int, least: int) -> None:
        """Start with the configured budget. Halving stops at `least`, or at the configured budget if that is lower."""
        self.max_num_tokens = configured
        self._configured = configured
        self._least = min(least, configured)
        self._trial = FIRST_TRIAL // 2
        self._num_good = 0

    def halve(self) -> None:
        """Halve the budget, because a step ran out of memory."""
        self._trial = min(2 * self._trial, LONGEST_TRIAL)
        self._set(max(self.max_num_tokens // 2, self._least))

    def observe(self, num_tokens: int) -> None:
        """Count a step that succeeded, if half the budget would have been too little for it."""
        if 2 * num_tokens <= self.max_num_tokens:
            return
        self._num_good += 1
        if self._num_good < self._trial:
            return
        if self.max_num_tokens < self._configured:
            self._set(min(2 * self.max_num_tokens, self._configured))
        else:
            self._num_good, self._trial = 0, max(self._trial // 2, FIRST_TRIAL // 2)

    def _set(self, max_num_tokens: int) -> None:
        self._num_good = 0
        self.max_num_tokens = max_num_tokens
        logger.warning("steps compute at most %d tokens from now on", max_num_tokens)
