"""The checks of attention_parity.py in the interpreter; test_attention.py runs this file in a process of its own."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.kernels.triton import attention_parity as parity

CPU = torch.device("cpu")

# A row may see no key of a part of its context: log2(0) is the -inf that it should be.
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log2:RuntimeWarning")


@pytest.mark.parametrize("case", parity.MIXED, ids=str)
def test_mixed_steps(case: parity.Case) -> None:
    parity.check_mixed_steps(case, CPU)


@pytest.mark.parametrize("case", parity.DECODES, ids=str)
def test_decodes(case: parity.Case) -> None:
    parity.check_decodes(case, CPU)


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


@pytest.mark.parametrize("case", parity.STATIC, ids=str)
def test_static_shapes(case: parity.Case) -> None:
    parity.check_static_shapes(case, CPU)


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
