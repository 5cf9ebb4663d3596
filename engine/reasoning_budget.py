"""When a model has to stop thinking.

A pure function of the output, so nothing has to be kept, and it holds for a row behind drafts as for any other.
"""

from collections.abc import Sequence

from engine.protocol import ReasoningBudget

_MAX_BEFORE_BEGIN = 8
"""Reasoning that has not begun within so many tokens is left out by the model."""


def forced_token_id(budget: ReasoningBudget, output_token_ids: Sequence[int]) -> int | None:
    """The id that has to follow an output: behind max_tokens of reasoning without the end, the end's ids one by one."""
    begin, end = budget.begin_token_ids, budget.end_token_ids
    start = _find(output_token_ids[: _MAX_BEFORE_BEGIN + len(begin)], begin)
    if start is None:
        return None
    limit = start + len(begin) + budget.max_tokens
    index = len(output_token_ids) - limit
    if not 0 <= index < len(end) or _find(output_token_ids[start + len(begin) : limit], end) is not None:
        return None
    return end[index]


def _find(token_ids: Sequence[int], run: tuple[int, ...]) -> int | None:
    """Where a run of ids begins."""
    starts = range(len(token_ids) - len(run) + 1)
    return next((start for start in starts if tuple(token_ids[start : start + len(run)]) == run), None)
