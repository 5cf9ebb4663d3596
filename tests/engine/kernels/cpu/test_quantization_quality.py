"""What fewer bits do to a trained model; see `tests.engine.quality`."""

import pytest

from tests.engine.quality import growth_of_perplexity, held_out_chats, log_probabilities
from weft.engine.kernels.cpu.layer_kernels import CpuKernels, WeightStorage
from weft.engine.kernels.cpu.library import load

MOST: dict[WeightStorage, float] = {"int8": 0.001, "int4": 0.03}
"""Growth over all positions; 6 bits exceed that of int8."""


def test_perplexity_hardly_grows() -> None:
    library = load()
    if library is None:
        pytest.skip("no native kernels on this machine")
    chats, is_answer_next = held_out_chats()
    plain = log_probabilities(CpuKernels(library), chats)
    for storage, most in MOST.items():
        quantized = log_probabilities(CpuKernels(library, storage), chats)
        of_answers, of_all = growth_of_perplexity(plain, quantized, chats, is_answer_next)
        assert abs(of_answers) < 0.01
        assert 0 < of_all < most
