"""The checks of few_rows_parity.py in Triton's interpreter; test_interpreter.py runs this file."""

from collections.abc import Callable

import pytest
import torch

from tests.engine.kernels.triton import few_rows_parity as parity

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # of a sigmoid that is 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("check", parity.CHECKS)
def test_parity(check: Callable[[torch.device, torch.dtype], None], dtype: torch.dtype) -> None:
    check(torch.device("cpu"), dtype)
