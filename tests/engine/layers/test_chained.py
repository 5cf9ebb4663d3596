import pytest
import torch

from weft.engine.kernels.torch.layer_kernels import TorchLinear
from weft.engine.layers.norm import RMSNorm
from weft.engine.layers.wrapped_linear import LinearWithEpilogue, scaled, soft_cap


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_follower_comes_before_the_residual(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    linear, norm = TorchLinear(torch.randn(48, 32, dtype=dtype)), RMSNorm(torch.rand(48) + 1, 1e-6)
    inputs, residual = torch.randn(5, 32, dtype=dtype), torch.randn(5, 48, dtype=dtype)
    chained = LinearWithEpilogue(linear, norm)
    expected = norm(linear(inputs))
    assert torch.equal(chained(inputs), expected)
    sums = residual.clone()
    chained.add_to(sums, inputs)
    assert torch.equal(sums, residual + expected)


def test_logits_are_capped_in_float32() -> None:
    head = TorchLinear(torch.eye(4, dtype=torch.bfloat16))
    logits = LinearWithEpilogue(head, soft_cap(30.0)).to_float32(torch.tensor([[0.0, 15.0, -3e4, 3e38]]).bfloat16())
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, torch.tensor([[0.0, 13.863515, -30.0, 30.0]]))


def test_scaled_embeddings_leave_the_table_as_it_was() -> None:
    table = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    rows = scaled(lambda ids: table[ids], 2.5)(torch.tensor([1, 1, 0]))
    assert rows.tolist() == [[7.5, 10.0], [7.5, 10.0], [2.5, 5.0]]
    assert table.tolist() == [[1.0, 2.0], [3.0, 4.0]]
