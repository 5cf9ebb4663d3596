"""The checks of experts_parity.py in Triton's interpreter; test_interpreter.py runs this file."""

from collections.abc import Callable

import pytest
import torch

from tests.engine.kernels.triton import experts_parity as parity

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # of a sigmoid that is 0


@pytest.mark.parametrize("check", parity.CHECKS)
def test_parity(check: Callable[[torch.device, torch.dtype], None]) -> None:
    """In a dot, Triton's interpreter takes bfloat16 for integers."""
    check(torch.device("cpu"), torch.float16)
