from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch

from weft.engine.batch import ConditionalBans, PenaltyBatch, Placeholders
from weft.engine.sampling.edits import apply_penalties, edit_logits

INF = float("inf")


def _penalties(rows: list[int], **fields: Any) -> PenaltyBatch:
    """Entry i stands for rows[i]; prompt and output are (entry, id) pairs, placeholders (entry, previous row) pairs."""
    prompt, output = fields.pop("prompt", []), fields.pop("output", [])
    placeholders = np.array(fields.pop("placeholders", []), np.int64).reshape(-1, 2)
    ids = [list(dict.fromkeys(i for e, i in prompt + output if e == entry)) for entry in range(len(rows))]
    factors = {
        name: np.array(fields.pop(name, [neutral] * len(rows)), np.float32)
        for name, neutral in (("presence", 0.0), ("frequency", 0.0), ("repetition", 1.0))
    }
    assert not fields
    return PenaltyBatch(
        rows=np.array(rows),
        **factors,
        starts=np.cumsum([0, *map(len, ids)]),
        ids=np.array(list(chain.from_iterable(ids)), np.int64),
        counts=np.array([output.count((e, i)) for e, of_entry in enumerate(ids) for i in of_entry], np.int64),
        placeholders=Placeholders(placeholders[:, 0], placeholders[:, 1]),
    )


def test_presence_and_frequency_look_at_the_output_only() -> None:
    logits = torch.zeros(3, 5)
    penalties = _penalties(
        [2, 0],
        presence=[0.5, 0.0],
        frequency=[0.25, 1.0],
        prompt=[(0, 4), (1, 4)],
        output=[(0, 1), (0, 1), (0, 1), (0, 3), (1, 2), (1, 2)],
    )
    apply_penalties(logits, penalties, None)
    assert logits.tolist() == [[0, 0, -2, 0, 0], [0] * 5, [0, -1.25, 0, -0.75, 0]]


def test_repetition_looks_at_prompt_and_output_once_and_by_sign() -> None:
    logits = torch.tensor([[4.0, -4.0, 4.0, -4.0, 0.0]])
    penalties = _penalties([0], repetition=[2.0], prompt=[(0, 0), (0, 1), (0, 0)], output=[(0, 0), (0, 1), (0, 4)])
    apply_penalties(logits, penalties, None)
    assert logits.tolist() == [[2.0, -8.0, 4.0, -4.0, 0.0]]


def test_placeholders_count_like_output_that_the_host_knows() -> None:
    previous = torch.tensor([3, 1])
    fields: dict[str, Any] = {"presence": [0.3, 0.2], "frequency": [0.1, 0.7], "repetition": [1.3, 0.9]}
    start = torch.randn(2, 6, generator=torch.Generator().manual_seed(0))
    known, unknown = start.clone(), start.clone()
    apply_penalties(known, _penalties([0, 1], output=[(0, 1), (1, 3), (0, 1), (1, 3)], **fields), None)
    apply_penalties(
        unknown, _penalties([0, 1], output=[(0, 1), (1, 3)], placeholders=[(0, 1), (1, 0)], **fields), previous
    )
    assert torch.equal(known, unknown)
    assert not torch.equal(known, start)


def test_a_placeholder_may_be_of_the_prompt_or_new() -> None:
    logits = torch.full((2, 4), 4.0)
    penalties = _penalties(
        [1, 0],
        presence=[0.5, 0.25],
        repetition=[2.0, 4.0],
        prompt=[(0, 3), (1, 3)],
        placeholders=[(0, 0), (1, 1)],
    )
    apply_penalties(logits, penalties, torch.tensor([3, 0]))
    assert logits.tolist() == [[0.75, 4, 4, 1], [4, 4, 4, 1.5]]


def test_repetition_comes_before_bias(make_batch: Any) -> None:
    logits = torch.tensor([[-1.0, 2.0]])
    batch = make_batch(
        1,
        bias_rows=[0],
        bias_ids=[0],
        bias_values=[10.0],
        penalties=_penalties([0], repetition=[2.0], output=[(0, 0)]),
    )
    edit_logits(logits, batch, None)
    assert logits.tolist() == [[8.0, 2.0]]


def test_biases_add_up_and_a_ban_wins(make_batch: Any) -> None:
    logits = torch.ones(2, 4)
    batch = make_batch(2, bias_rows=[0, 0, 1, 1], bias_ids=[2, 2, 0, 0], bias_values=[1.5, 1.0, -INF, 100.0])
    edit_logits(logits, batch, None)
    assert logits.tolist() == [[1, 1, 3.5, 1], [-INF, 1, 1, 1]]


def test_allowed_ids_ban_the_others_and_stay_biased_and_banned(make_batch: Any) -> None:
    logits = torch.arange(8.0).reshape(2, 4)
    batch = make_batch(
        2,
        bias_rows=[1, 1],
        bias_ids=[0, 3],
        bias_values=[0.5, -INF],
        allowed_rows=[1],
        allowed_entries=[0, 0, 0],
        allowed_ids=[0, 3, 0],
    )
    edit_logits(logits, batch, None)
    assert logits.tolist() == [[0, 1, 2, 3], [4.5, -INF, -INF, -INF]]


def test_conditional_bans_hold_only_if_the_previous_step_sampled_the_id(make_batch: Any) -> None:
    bans = ConditionalBans(*(np.array(column) for column in ([0, 0, 1], [1, 2, 3], [1, 1, 0], [7, 8, 9])))
    logits = torch.zeros(2, 4)
    edit_logits(logits, make_batch(2, conditional_bans=bans), torch.tensor([9, 7]))
    assert logits.tolist() == [[0, -INF, 0, 0], [0, 0, 0, -INF]]


def test_penalties_of_banned_logits_are_not_nan() -> None:
    logits = torch.tensor([[-INF, 1.0]])
    apply_penalties(
        logits,
        _penalties([0], presence=[-2.0], frequency=[2.0], repetition=[0.5], output=[(0, 0), (0, 0), (0, 1)]),
        None,
    )
    assert logits.tolist() == [[-INF, 2.0 + 2.0 - 2.0]]


def test_ids_of_the_previous_step_are_asked_for(make_batch: Any) -> None:
    bans = ConditionalBans(*(np.zeros(1, np.int64) for _ in range(4)))
    with pytest.raises(AssertionError, match="previous step"):
        edit_logits(torch.zeros(1, 4), make_batch(1, conditional_bans=bans), None)
