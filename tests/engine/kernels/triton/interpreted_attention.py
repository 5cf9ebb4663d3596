"""The checks of attention_parity.py in the interpreter; test_interpreter.py runs this file."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.kernels.triton import attention_parity as parity
from weft.engine.batch import GraphKey

CPU = torch.device("cpu")

# A row may see no key of a part of its context: log2(0) is the -inf that it should be.
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log2:RuntimeWarning")


@pytest.mark.parametrize("case", parity.MIXED, ids=str)
def test_mixed_steps(case: parity.Case) -> None:
    parity.check_mixed_steps(case, CPU)


@pytest.mark.parametrize("case", parity.DECODES, ids=str)
def test_decodes(case: parity.Case) -> None:
    parity.check_decodes(case, CPU)


@pytest.mark.parametrize("case", parity.PICTURES, ids=str)
def test_pictures(case: parity.Case) -> None:
    parity.check_pictures(case, CPU)


@pytest.mark.parametrize("case", parity.LIBRARIES, ids=str)
def test_libraries(case: parity.Case) -> None:
    parity.check_libraries(case, CPU)


@pytest.mark.parametrize("case", parity.TILED, ids=str)
def test_tiles(case: parity.Case) -> None:
    parity.check_mixed_steps(case, CPU)
    parity.check_decodes(case, CPU)


@pytest.mark.parametrize("case", parity.COPIES, ids=str)
def test_copies(case: parity.Case) -> None:
    parity.check_copies(case, CPU)


@pytest.mark.parametrize("case", parity.RECORDED, ids=str)
def test_recorded_steps(case: parity.Case) -> None:
    parity.check_recorded_steps(case, CPU)


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_the_plans_of_the_largest_steps_fit(is_deterministic: bool) -> None:
    """`begin` refuses to write behind its memory."""
    harness = parity.Harness(parity.Case(is_deterministic=is_deterministic), CPU)
    limits = parity.LIMITS
    num_tokens, longest = limits.max_num_batched_tokens, limits.max_model_len
    table = np.zeros((limits.max_num_seqs, longest // harness.case.block_size), np.int64)
    for counts in ([1] * 8, [5] * 8, [num_tokens // 8] * 8, [9] * 7 + [num_tokens - 63]):
        starts = np.cumsum([0, *counts])
        batch = harness.paged.make_batch([(harness.paged.add(np.zeros(1, np.int64)), 1)])
        group = dataclasses.replace(batch.groups[0], slot_mapping=np.zeros(starts[-1], np.int64), block_tables=table)
        batch = dataclasses.replace(
            batch,
            token_ids=np.zeros(starts[-1], np.int64),
            query_start_locs=starts,
            seq_lens=np.full(8, longest),
            groups=(group,),
        )
        for graph in (None, GraphKey(num_tokens, False)):
            harness.backend.begin(dataclasses.replace(batch, graph=graph))


def ordered_matmul(a: Any, b: Any, dtype: Any) -> Any:
    """A product whose rows do not depend on how many there are.

    The interpreter's own is numpy's, and numpy's BLAS adds in another order for tiles of another height on some CPUs.
    """
    product = np.zeros((len(a), b.shape[1]), dtype)
    for k in range(len(b)):
        product += a[:, k, None].astype(dtype) * b[k].astype(dtype)
    return product


@pytest.mark.parametrize("case", parity.INVARIANT, ids=str)
def test_invariance(case: parity.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "matmul", ordered_matmul)
    parity.check_invariance(case, CPU)
