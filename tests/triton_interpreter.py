"""Runs tests in Triton's interpreter, which is chosen before triton is imported, and for a whole process."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def run_interpreted(path: Path) -> None:
    """Run the tests of a file, whose name does not begin with test_, in a process of their own."""
    options = ["-q", "-p", "no:cacheprovider", "-p", "tests.quick_interpreter", "--noconftest", str(path)]
    command = [sys.executable, "-m", "pytest", *options]
    # Of tensors this small, a second thread only spins until the first has something to do.
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
