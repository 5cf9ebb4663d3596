"""Attention in Triton's interpreter; tests/fake_gpu compiles the kernels."""

import importlib.util
import pathlib
from importlib import metadata

import numpy as np
import pytest

from tests.triton_interpreter import needs_triton, run_interpreted


def has_broken_range() -> bool:
    """Whether the interpreter makes integers of arrays with one value, which NumPy refuses since 2.4."""
    if importlib.util.find_spec("triton") is None:
        return False
    triton, numpy = (tuple(map(int, v.split(".")[:2])) for v in (metadata.version("triton"), np.__version__))
    return triton < (3, 9) and numpy >= (2, 4)


@needs_triton
@pytest.mark.skipif(has_broken_range(), reason="this Triton's interpreter cannot count with this NumPy")
@pytest.mark.timeout(900)
def test_parity_in_the_interpreter() -> None:
    run_interpreted(pathlib.Path(__file__).with_name("interpreted_attention.py"))
