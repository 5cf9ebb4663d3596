"""What a KV cache of one byte a value does to a trained model; see `tests.engine.quality`.

K and V are rounded as the kernels on CUDA do, and attended to by the reference, so that no GPU is needed.
"""

import torch

from tests.engine.quality import growth_of_perplexity, held_out_chats, log_probabilities
from weft.engine.kernels.torch.torch_kit import TorchKit
from weft.engine.layers.attention import AttentionStep

LARGEST = 448.0


class Rounded:
    """Attention to K and V that were converted to e4m3 and back."""

    def __init__(self, step: AttentionStep) -> None:
        self._step = step

    def cache(self, layer: int) -> None:
        """`attend` writes."""

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        kept = (part.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).to(part.dtype) for part in (keys, values))
        return self._step.attend(layer, queries, *kept)


def test_perplexity_stays_within_one_percent() -> None:
    chats, is_answer_next = held_out_chats()
    plain, rounded = log_probabilities(TorchKit(), chats), log_probabilities(TorchKit(), chats, Rounded)
    of_answers, of_all = growth_of_perplexity(plain, rounded, chats, is_answer_next)
    assert abs(of_answers) < 0.01
    assert 0 < of_all < 0.01
