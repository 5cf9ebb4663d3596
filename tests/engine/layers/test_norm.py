import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from weft.engine.layers.norm import HeadNorm, RMSNorm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 300.0])
def test_rms_norm_equals_that_of_transformers(dtype: torch.dtype, scale: float) -> None:
    torch.manual_seed(0)
    hidden, weight = (torch.randn(5, 64) * scale).to(dtype), torch.rand(64).to(dtype)
    reference = Qwen3RMSNorm(64, eps=1e-6).to(dtype)
    reference.weight.data = weight
    normed = RMSNorm(weight, 1e-6)(hidden)
    assert normed.dtype == dtype
    with torch.no_grad():
        torch.testing.assert_close(normed, reference(hidden))


def test_head_norm_uses_the_weight_of_each_kind_of_head() -> None:
    torch.manual_seed(0)
    heads, query_weight, key_weight = torch.randn(3, 6, 16), torch.rand(16), torch.rand(16)
    normed = HeadNorm(query_weight, key_weight, 4, 2, 1e-6)(heads)
    torch.testing.assert_close(normed[:, :4], RMSNorm(query_weight, 1e-6)(heads[:, :4]))
    torch.testing.assert_close(normed[:, 4:], RMSNorm(key_weight, 1e-6)(heads[:, 4:]))
