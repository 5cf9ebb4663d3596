import pytest

from engine.protocol import ReasoningBudget
from engine.reasoning_budget import forced_token_id


@pytest.mark.parametrize(
    ("output", "forced"),
    [
        ([], None),
        ([5, 5], None),
        ([5, 5, 5], 8),
        ([5, 5, 5, 8], 9),
        ([5, 5, 5, 8, 9], None),
        ([5, 8, 9], None),
        ([8, 9, 5, 5], None),
        ([5, 9, 8], 8),
        ([5, 5, 8], 8),
        ([5, 5, 8, 9], 9),
    ],
)
def test_the_end_is_forced_unless_it_has_come(output: list[int], forced: int | None) -> None:
    assert forced_token_id(ReasoningBudget(3, (8, 9)), output) == forced


def test_a_budget_of_nothing_forces_the_end_at_once() -> None:
    assert forced_token_id(ReasoningBudget(0, (7,)), []) == 7
    assert forced_token_id(ReasoningBudget(0, (7,)), [7]) is None


@pytest.mark.parametrize(
    ("output", "forced"),
    [
        ([5, 5, 5, 5, 5, 5], None),
        ([5, 1, 2], None),
        ([5, 1, 2, 5, 5, 5], 8),
        ([1, 2, 5, 5, 5, 8], 9),
        ([1, 2, 8, 9, 5], None),
        ([5] * 9 + [1, 2, 5, 5, 5], None),  # too late to be the beginning
    ],
)
def test_reasoning_counts_from_where_it_begins(output: list[int], forced: int | None) -> None:
    assert forced_token_id(ReasoningBudget(3, (8, 9), (1, 2)), output) == forced
