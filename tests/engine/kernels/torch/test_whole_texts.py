"""Attention among whole texts against the plain formula of sdpa.py."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from weft.engine.batch import Batch
from weft.engine.cache.specs import PagedKV
from weft.engine.kernels.torch import sdpa
from weft.engine.kernels.torch.sdpa import attend, attend_to_texts, equal_texts
from weft.engine.runner.dummy_batch import dummy_batch

CPU = torch.device("cpu")
SPEC = PagedKV(2, 16, is_bidirectional=True)


def batch_of(lengths: list[int], spec: PagedKV) -> Batch:
    starts = np.append(0, np.cumsum(lengths))
    batch = dummy_batch(max(lengths), [spec], 32, 1, max(lengths))
    return replace(batch, query_start_locs=starts, seq_lens=np.array(lengths))


@pytest.mark.parametrize("lengths", [[5, 9, 5, 1], [7, 7], [40]], ids=str)
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("num_heads", [2, 4])
@pytest.mark.parametrize("soft_cap", [None, 0.5])
def test_each_text_sees_itself_alone(
    monkeypatch: pytest.MonkeyPatch, lengths: list[int], window: int | None, num_heads: int, soft_cap: float | None
) -> None:
    monkeypatch.setattr(sdpa, "_SCORES_AT_ONCE", 60)  # so that a soft cap sees some queries at a time
    torch.manual_seed(0)
    spec = replace(SPEC, sliding_window=window, soft_cap=soft_cap)
    texts = equal_texts(batch_of(lengths, spec), spec, CPU)
    assert texts is not None and len(texts) == len(set(lengths))
    queries, (keys, values) = torch.randn(sum(lengths), num_heads, 16), torch.randn(2, sum(lengths), 2, 16)
    got = torch.split(attend_to_texts(spec, texts, (queries, keys, values)), lengths)
    parts = zip(got, *(torch.split(part, lengths) for part in (queries, keys, values)), strict=True)
    for one, q, k, v in parts:
        places = torch.arange(len(q))
        is_seen = (places[:, None] - places).abs() < (window or len(q))
        torch.testing.assert_close(one, attend(q[None], k[None], v[None], is_seen[None], spec)[0])


@pytest.mark.parametrize("change", [{"is_bidirectional": False}, {"slopes": (0.5, 0.25)}])
def test_other_attention_is_left_to_the_formula(change: dict[str, object]) -> None:
    spec = replace(SPEC, **change)  # type: ignore[arg-type]
    assert equal_texts(batch_of([4], spec), spec, CPU) is None


def test_parts_of_a_request_are_left_to_the_formula() -> None:
    assert equal_texts(replace(batch_of([4], SPEC), seq_lens=np.array([6])), SPEC, CPU) is None
