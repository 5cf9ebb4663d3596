"""How long a source of drafts is left out after a failure, such as missing memory.

Each failure doubles the next pause. As many good steps as the last pause had halve it again.
"""

import logging

logger = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 64, 1 << 14
"""Steps without drafts after the first failure, and after many."""


class Pause:
    """The pauses of one source of drafts; the speculator reports how its steps went."""

    def __init__(self, name: str) -> None:
        """Start without a pause; the log uses the name."""
        self._name = name
        self._next = FIRST_PAUSE
        self._num_skipped = 0
        self._num_good = 0

    def is_on(self) -> bool:
        """Whether the source is left out in this step; counts the step."""
        if not self._num_skipped:
            return False
        self._num_skipped -= 1
        return True

    def begin(self) -> None:
        """Leave the source out from now on. Called where its exception is handled, which is logged."""
        logger.exception("%s failed; the next %d steps go without", self._name, self._next)
        self._num_skipped, self._num_good = self._next, 0
        self._next = min(2 * self._next, LONGEST_PAUSE)

    def observe_success(self) -> None:
        """Count a step in which the source did not fail."""
        self._num_good += 1
        if 2 * self._num_good >= self._next > FIRST_PAUSE:
            self._next //= 2
            self._num_good = 0
