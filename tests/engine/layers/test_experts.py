"""Which experts are chosen, with numbers that can be followed by hand, and Phi's mixer against transformers'."""

import pytest
import torch
from transformers.models.phimoe.modeling_phimoe import sparsemixer

from weft.engine.families.experts import SparseMixer, TopK
from weft.engine.layers.feed_forward import choose

LOGITS = torch.tensor([[0.0, 3.0, 1.0, 2.0]])


def chosen_by(routing: TopK, bias: list[float] | None = None) -> tuple[list[int], list[float]]:
    ids, shares = choose(routing, LOGITS, None if bias is None else torch.tensor(bias))
    return ids[0].tolist(), shares[0].tolist()


def test_shares_are_softmax_scores_of_all_experts() -> None:
    ids, shares = chosen_by(TopK(2))
    assert ids == [1, 3] and shares == pytest.approx([0.643914, 0.236883], abs=1e-6)


@pytest.mark.parametrize("routing", [TopK(2, divides=True), TopK(2, scores=None, shares="softmax")])
def test_softmax_then_division_is_softmax_of_the_chosen(routing: TopK) -> None:
    ids, shares = chosen_by(routing)
    assert ids == [1, 3] and shares == pytest.approx([0.731059, 0.268941], abs=1e-6)


def test_a_bias_changes_the_choice_but_no_share() -> None:
    ids, shares = chosen_by(TopK(1, scores="sigmoid", scale=2.5), [0.6, 0.0, 0.0, 0.0])
    assert ids == [0] and shares == pytest.approx([1.25])


@pytest.mark.parametrize(("num_in_rank", "chosen"), [(1, [1, 0]), (2, [3, 2])])
def test_groups_are_compared_by_their_best_experts(num_in_rank: int, chosen: list[int]) -> None:
    """The first group has the best expert, the second one the better pair."""
    logits = torch.tensor([[0.0, 3.0, 1.8, 2.0]])
    ids, _ = choose(TopK(2, None, num_groups=2, num_best_groups=1, num_in_rank=num_in_rank), logits, None)
    assert ids[0].tolist() == chosen


def test_sparse_mixer() -> None:
    torch.manual_seed(0)
    logits = torch.randn(200, 8) * 0.1 + 1
    shares, ids = sparsemixer(logits, jitter_eps=0.05, training=False)
    our_ids, our_shares = choose(SparseMixer(2, 0.1), logits, None)
    assert torch.equal(our_ids, ids)
    torch.testing.assert_close(our_shares, shares)
    assert (shares < 1).any() and (shares == 1).any()


@pytest.mark.parametrize(
    "routing",
    [
        TopK(8, divides=True),
        TopK(8, "sigmoid", divides=True, num_groups=4, num_best_groups=2, num_in_rank=2, scale=2.0),
        TopK(4, None, shares="softmax"),
        SparseMixer(2, 0.1),
    ],
    ids=["softmax", "groups", "of the chosen", "mixer"],
)
def test_a_token_does_not_feel_the_others(routing: TopK | SparseMixer) -> None:
    torch.manual_seed(0)
    logits = torch.randn(70, 64)
    ids, shares = choose(routing, logits, None)
    for num_rows in (1, 2, 17, 70):
        for first in range(0, 71 - num_rows, num_rows):
            rows = slice(first, first + num_rows)
            own_ids, own_shares = choose(routing, logits[rows].contiguous(), None)
            assert torch.equal(own_ids, ids[rows]) and torch.equal(own_shares, shares[rows])
