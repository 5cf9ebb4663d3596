"""What int8 does to a trained model; see `tests.engine.quality`."""

import pytest

from tests.engine.kernels.cpu.test_layers import PLAIN_STORAGES
from tests.engine.quality import growth_of_perplexity, held_out_chats, log_probabilities
from weft.engine.kernels.cpu.library import load
from weft.engine.kernels.cpu.native_kit import NativeKit


def test_perplexity_stays_within_one_percent() -> None:
    library = load()
    if library is None:
        pytest.skip("no native kernels on this machine")
    chats, is_answer_next = held_out_chats()
    plain, quantized = (log_probabilities(NativeKit(library, storage), chats) for storage in PLAIN_STORAGES)
    of_answers, of_all = growth_of_perplexity(plain, quantized, chats, is_answer_next)
    assert abs(of_answers) < 0.01
    assert 0 < of_all < 0.001  # 6 bits exceed this
