import pytest

from weft.engine.guidance.matcher import ReasoningProgress
from weft.engine.wire.messages import ReasoningBudget


def is_used_up(budget: ReasoningBudget, output: list[int]) -> bool:
    """Whatever part of the output is drafts."""
    answers = set()
    for num_known in range(len(output) + 1):
        progress = ReasoningProgress(budget)
        for token_id in output[:num_known]:
            progress.append(token_id)
        answers.add(progress.is_used_up(output[num_known:]))
    (answer,) = answers
    return answer


@pytest.mark.parametrize(
    ("output", "is_over"),
    [
        ([], False),
        ([5, 5], False),
        ([5, 5, 5], True),
        ([5, 5, 5, 5], True),  # what had to come could not
        ([5, 5, 5, 8], False),
        ([5, 8, 5, 5, 5], False),
    ],
)
def test_the_end_has_to_come_unless_it_has(output: list[int], is_over: bool) -> None:
    assert is_used_up(ReasoningBudget(3, 8), output) == is_over


def test_a_budget_of_nothing_is_used_up_at_once() -> None:
    assert is_used_up(ReasoningBudget(0, 7), [])
    assert not is_used_up(ReasoningBudget(0, 7), [7])


@pytest.mark.parametrize(
    ("output", "is_over"),
    [
        ([5, 5, 5, 5, 5, 5], False),
        ([5, 1], False),
        ([5, 1, 5, 5, 5], True),
        ([1, 8, 5, 5, 5], False),
        ([5] * 9 + [1, 5, 5, 5], False),  # too late to be the beginning
    ],
)
def test_reasoning_counts_from_where_it_begins(output: list[int], is_over: bool) -> None:
    assert is_used_up(ReasoningBudget(3, 8, 1), output) == is_over
