"""When a model has to stop thinking.

A pure function of the output, so nothing has to be kept, and it holds for a row behind drafts as for any other.
"""

from collections.abc import Sequence

from engine.protocol import ReasoningBudget

_MAX_BEFORE_BEGIN = 8
"""Reasoning that has not begun within so many tokens is left out by the model."""


def is_used_up(budget: ReasoningBudget, output_token_ids: Sequence[int]) -> bool:
    """Whether reasoning goes on behind its last token, so that its end has to come."""
    start = 0
    if budget.begin_token_id is not None:
        head = list(output_token_ids[:_MAX_BEFORE_BEGIN])
        if budget.begin_token_id not in head:
            return False
        start = head.index(budget.begin_token_id) + 1
    return len(output_token_ids) >= start + budget.max_tokens and budget.end_token_id not in output_token_ids[start:]
