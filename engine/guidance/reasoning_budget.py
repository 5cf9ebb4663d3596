"""When a model has to stop thinking: kept up to date with each id of the output, so that no step looks at all of it."""

import copy
from collections.abc import Iterable

from weft.engine.shared.messages import ReasoningBudget

_MAX_BEFORE_BEGIN = 8
"""Reasoning that has not begun within so many tokens is left out by the model."""


class ReasoningProgress:
    """How far the reasoning of one choice is; `has_ended` says that it is over. Owned by the request."""

    def __init__(self, budget: ReasoningBudget) -> None:
        """Start with no output."""
        self.budget = budget
        self._num_output_tokens = 0
        self._start = 0 if budget.begin_token_id is None else None
        self.has_ended = False

    def append(self, token_id: int) -> None:
        """Take in the next id of the output. O(1)."""
        self._num_output_tokens += 1
        if self._start is not None:
            self.has_ended = self.has_ended or token_id == self.budget.end_token_id
        elif token_id == self.budget.begin_token_id and self._num_output_tokens <= _MAX_BEFORE_BEGIN:
            self._start = self._num_output_tokens

    def is_used_up(self, draft_token_ids: Iterable[int] = ()) -> bool:
        """Whether reasoning goes on behind its last token, so that its end has to come; if these drafts are accepted.

        O(drafts).
        """
        progress = self
        for token_id in draft_token_ids:
            progress = copy.copy(self) if progress is self else progress
            progress.append(token_id)
        if progress._start is None or progress.has_ended:
            return False
        return progress._num_output_tokens >= progress._start + self.budget.max_tokens
