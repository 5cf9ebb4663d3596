"""Most tokens of a step: as configured, fewer after a step that found no memory for so many, and later more again.

What took the memory may be gone (another process on the device, an unusual batch), so after many steps that needed the
budget and succeeded it is doubled. A step that fails ends its requests: each failure doubles how many those are, and
as many good steps with the whole budget halve it again.
"""

import logging

logger = logging.getLogger(__name__)

FIRST_TRIAL, LONGEST_TRIAL = 256, 1 << 14
"""Steps that must succeed before the budget grows again: after the first failure, and at most."""


class TokenBudget:
    """Belongs to the scheduler, which reads `max_num_tokens`; the engine tells how steps ended."""

    def __init__(self, configured: int, least: int) -> None:
        """Start with what is configured; halving never goes below `least`, unless the configured budget is."""
        self.max_num_tokens = configured
        self._configured = configured
        self._least = min(least, configured)
        self._trial = FIRST_TRIAL // 2
        self._num_good = 0

    def halve(self) -> None:
        """Take back half of it, because a step had no memory."""
        self._trial = min(2 * self._trial, LONGEST_TRIAL)
        self._set(max(self.max_num_tokens // 2, self._least))

    def observe(self, num_tokens: int) -> None:
        """Count a step that has succeeded, if half the budget had been too little for it."""
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
