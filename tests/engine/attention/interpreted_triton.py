"""The checks of triton_parity.py in Triton's interpreter; test_triton.py runs this file in a process of its own."""

import pytest
import torch

from tests.engine.attention import triton_parity as parity

CPU = torch.device("cpu")


@pytest.mark.parametrize("case", parity.MIXED, ids=str)
def test_mixed_steps(case: parity.Case) -> None:
    parity.check_mixed_steps(case, CPU)


@pytest.mark.parametrize("case", parity.DECODES, ids=str)
def test_decodes(case: parity.Case) -> None:
    parity.check_decodes(case, CPU)


@pytest.mark.parametrize("case", parity.FRESH, ids=str)
def test_fresh_prompts(case: parity.Case) -> None:
    parity.check_fresh_prompts(case, CPU)


@pytest.mark.parametrize("case", parity.COPIES, ids=str)
def test_copies(case: parity.Case) -> None:
    parity.check_copies(case, CPU)


@pytest.mark.parametrize("case", parity.STATIC, ids=str)
def test_static_shapes(case: parity.Case) -> None:
    parity.check_static_shapes(case, CPU)


@pytest.mark.parametrize("case", parity.INVARIANT, ids=str)
def test_invariance(case: parity.Case) -> None:
    parity.check_invariance(case, CPU)
