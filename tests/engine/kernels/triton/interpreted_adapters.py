"""The checks of adapters_parity.py in Triton's interpreter; test_interpreter.py runs this file."""

from collections.abc import Callable

import pytest
import torch

from tests.engine.kernels.triton import adapters_parity as parity


@pytest.mark.parametrize("check", parity.CHECKS)
def test_parity(check: Callable[[torch.device, torch.dtype], None]) -> None:
    check(torch.device("cpu"), torch.float16)
