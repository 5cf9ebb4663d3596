"""The checks of layer_parity.py in Triton's interpreter; test_interpreter.py runs this file."""

from collections.abc import Callable

import pytest
import torch

from tests.engine.kernels.triton import layer_parity as parity

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # of a sigmoid that is 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("check", parity.CHECKS)
def test_parity(check: Callable[[torch.device, torch.dtype], None], dtype: torch.dtype) -> None:
    check(torch.device("cpu"), dtype)
