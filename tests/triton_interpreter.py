"""Tests of Triton's kernels, which Triton need not be installed for."""

import importlib.util

import pytest

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
