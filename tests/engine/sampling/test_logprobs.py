import numpy as np
import pytest
import torch

from weft.engine.batch import AskedLogprobs, ScoreBatch
from weft.engine.sampling.scores import pick, score, token_logprobs


def _scores(target_ids: list[int], num_logprobs: list[int]) -> ScoreBatch:
    return ScoreBatch(np.arange(len(target_ids)), np.array(target_ids), np.array(num_logprobs))


def test_scores_are_log_softmax_with_as_many_alternatives_as_each_row_asks() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.2, 0.3], [0.1, 0.1, 0.8], [0.25, 0.5, 0.25]])) + 3.0
    entries = token_logprobs(score(logits, _scores([1, 2, 0], [2, 0, 3])))
    assert [entry.top_token_ids for entry in entries] == [[0, 2], [], [1, 0, 2]]
    assert np.exp([entry.logprob for entry in entries]) == pytest.approx([0.2, 0.8, 0.25], rel=1e-6)
    assert np.exp(entries[0].top_logprobs) == pytest.approx([0.5, 0.3], rel=1e-6)
    assert entries[1].top_logprobs == []
    assert np.exp(entries[2].top_logprobs) == pytest.approx([0.5, 0.25, 0.25], rel=1e-6)


def test_scoring_leaves_the_logits_alone() -> None:
    logits = torch.randn(2, 300)
    before = logits.clone()
    score(logits, _scores([0, 1], [5, 5]))
    assert torch.equal(logits, before)


def test_more_alternatives_than_the_vocabulary_gives_all_of_it() -> None:
    entries = token_logprobs(score(torch.zeros(1, 3), _scores([0], [64])))
    assert entries[0].top_token_ids == [0, 1, 2]


def test_no_alternatives_at_all() -> None:
    tensors = pick(torch.log_softmax(torch.zeros(2, 4), -1), torch.tensor([1, 3]), np.array([5, 9]), np.array([0, 0]))
    assert tensors.rows.tolist() == [5, 9]
    entries = token_logprobs(tensors)
    assert [entry.top_token_ids for entry in entries] == [[], []]
    assert [entry.logprob for entry in entries] == pytest.approx([-np.log(4)] * 2)


def test_entries_do_not_depend_on_their_neighbours() -> None:
    """The logits are full of ties, whose order must not depend on the largest count in the batch."""
    values = np.round(np.random.default_rng(0).normal(size=(8, 5003)) * 4) / 2
    logits = torch.tensor(values, dtype=torch.float32)
    targets, counts = list(range(8)), [0, 1, 2, 5, 20, 64, 3, 0]
    together = token_logprobs(score(logits, _scores(targets, counts)))
    for row in range(8):
        alone = token_logprobs(score(logits[row : row + 1].clone(), _scores([targets[row]], [counts[row]])))
        assert alone == [together[row]]


def test_asked_ids_come_behind_the_best_ones_whatever_their_rank() -> None:
    logprobs = torch.log(torch.tensor([[0.5, 0.2, 0.3], [0.1, 0.1, 0.8]]))
    asked = AskedLogprobs(np.array([4, 9, 9]), np.array([1, 0, 2]))
    first, second = token_logprobs(pick(logprobs, torch.tensor([0, 2]), np.array([4, 9]), np.array([0, 1]), asked))
    assert (first.top_token_ids, second.top_token_ids) == ([1], [2, 0, 2])
    assert np.exp(first.top_logprobs) == pytest.approx([0.2])
    assert np.exp(second.top_logprobs) == pytest.approx([0.8, 0.1, 0.8])
