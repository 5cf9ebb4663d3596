"""When a model has to stop thinking.

A pure function of the output, so nothing has to be kept, and it holds for a row behind drafts as for any other.
"""

from collections.abc import Sequence

from engine.protocol import ReasoningBudget


def forced_token_id(budget: ReasoningBudget, output_token_ids: Sequence[int]) -> int | None:
    """The id that has to follow an output: behind max_tokens ids without the end, the end's ids one by one."""
    end = budget.end_token_ids
    index = len(output_token_ids) - budget.max_tokens
    if not 0 <= index < len(end) or _contains(output_token_ids[: budget.max_tokens], end):
        return None
    return end[index]


def _contains(token_ids: Sequence[int], run: tuple[int, ...]) -> bool:
    return any(tuple(token_ids[start : start + len(run)]) == run for start in range(len(token_ids) - len(run) + 1))
