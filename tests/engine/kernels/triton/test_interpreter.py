"""What the kernels compute, in Triton's interpreter; tests/fake_gpu and their own files look at their machine code."""

import importlib.util
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import numpy as np

from tests.triton_interpreter import needs_triton

TESTS = Path(__file__).parents[2]


def has_broken_range() -> bool:
    """Whether the interpreter makes integers of arrays with one value, which NumPy refuses since 2.4."""
    if importlib.util.find_spec("triton") is None:
        return False
    triton, numpy = (tuple(map(int, v.split(".")[:2])) for v in (metadata.version("triton"), np.__version__))
    return triton < (3, 9) and numpy >= (2, 4)


@needs_triton
def test_parity_in_the_interpreter() -> None:
    """One process runs all these files, whose names do not begin with test_: each would load torch and Triton again.

    The interpreter is chosen before Triton is imported, and for a whole process.
    """
    left_out = "interpreted_attention.py" if has_broken_range() else ""
    paths = sorted(path for path in TESTS.rglob("interpreted_*.py") if path.name != left_out)
    assert len(paths) > 6
    options = ["-q", "-p", "no:cacheprovider", "-p", "tests.quick_interpreter", "--noconftest"]
    command = [sys.executable, "-m", "pytest", *options, *map(str, paths)]
    # Of tensors this small, a second thread only spins until the first has something to do.
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
