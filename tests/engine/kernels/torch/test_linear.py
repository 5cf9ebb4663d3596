import pytest
import torch

from weft.engine.kernels.torch.linear import OnednnLinear, TorchLinear
from weft.engine.kernels.torch.torch_kit import torch_kit

CPU = torch.device("cpu")
needs_bfloat16 = pytest.mark.skipif(
    torch_kit(CPU, torch.bfloat16).name == "torch", reason="the CPU has no bfloat16 instructions"
)


@pytest.mark.parametrize("kind", [TorchLinear, pytest.param(OnednnLinear, marks=needs_bfloat16)])
@pytest.mark.parametrize("num_rows", [1, 5, 64])
@pytest.mark.parametrize("has_bias", [False, True])
def test_all_ways_of_calling_compute_the_same(kind: type[TorchLinear], num_rows: int, has_bias: bool) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(96, 64).bfloat16(), torch.randn(96).bfloat16() if has_bias else None
    inputs, residual = torch.randn(num_rows, 64).bfloat16(), torch.randn(num_rows, 96).bfloat16()
    expected = torch.nn.functional.linear(inputs.double(), weight.double(), None if bias is None else bias.double())
    with torch.inference_mode():
        linear = kind(weight, bias)
        torch.testing.assert_close(linear(inputs).double(), expected, atol=0.1, rtol=0.01)
        logits = linear.to_float32(inputs)
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits.double(), expected, atol=0.1, rtol=0.01)
        sums = residual.clone()
        linear.add_to(sums, inputs)
        torch.testing.assert_close(sums.double(), expected + residual.double(), atol=0.2, rtol=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_other_dtypes_and_devices_stay_plain(dtype: torch.dtype) -> None:
    assert torch_kit(CPU, dtype).name == "torch"
    assert torch_kit(torch.device("cuda"), torch.bfloat16).name == "torch"
