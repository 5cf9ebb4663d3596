"""What a KV cache of one byte a value does to a trained model; see `tests.engine.quality`.

K and V are rounded as the kernels do, fp8 on CUDA and int8 on a CPU, and attended to by the reference.
"""

import pytest
import torch

from tests.engine.quality import growth_of_perplexity, held_out_chats, log_probabilities
from weft.engine.kernels.torch.layer_kernels import TorchKernels
from weft.engine.layers.block import AttentionStep, Heads

LARGEST = 448.0


class Fp8Cache:
    """Attention to K and V that were converted to e4m3 and back."""

    def __init__(self, step: AttentionStep) -> None:
        self._step = step

    def cache(self, layer: int) -> None:
        """`attend` writes."""

    def attend(
        self, layer: int, heads: Heads, sinks: torch.Tensor | None = None, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        queries, keys, values = heads
        return self._step.attend(layer, (queries, self.kept(keys), self.kept(values)))

    def kept(self, part: torch.Tensor) -> torch.Tensor:
        """What the cache holds of keys or values (num_tokens, num_kv_heads, head_dim)."""
        return part.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).to(part.dtype)


class Int8Cache(Fp8Cache):
    """The same with int8 and a scale for each head of a token."""

    def kept(self, part: torch.Tensor) -> torch.Tensor:
        scales = part.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
        return (part / scales).round() * scales


@pytest.mark.parametrize("cache", [Fp8Cache, Int8Cache])
def test_perplexity_stays_within_one_percent(cache: type[Fp8Cache]) -> None:
    chats, is_answer_next = held_out_chats()
    plain, rounded = log_probabilities(TorchKernels(), chats), log_probabilities(TorchKernels(), chats, cache)
    of_answers, of_all = growth_of_perplexity(plain, rounded, chats, is_answer_next)
    assert abs(of_answers) < 0.01
    assert 0 < abs(of_all) < 0.01
