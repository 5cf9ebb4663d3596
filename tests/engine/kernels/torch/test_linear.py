import pytest
import torch

from weft.engine.kernels.torch.layer_kernels import ROW_TILE, OnednnLinear, TiledLinear, TorchLinear, torch_kernels

CPU = torch.device("cpu")
needs_bfloat16 = pytest.mark.skipif(
    torch_kernels(CPU, torch.bfloat16).name == "torch", reason="the CPU has no bfloat16 instructions"
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


def test_other_dtypes_and_devices_stay_plain() -> None:
    assert torch_kernels(CPU, torch.float16).name == "torch"
    assert torch_kernels(torch.device("cuda"), torch.bfloat16).name == "torch"


@pytest.mark.skipif(torch_kernels(CPU, torch.float32).name == "torch", reason="oneDNN does not compute here")
@pytest.mark.parametrize("num_rows", [0, 1, 5, 300])
def test_onednn_computes_float32_to_its_precision(num_rows: int) -> None:
    """Inputs may have a stride, and GELU may follow."""
    torch.manual_seed(0)
    weight, bias, inputs = torch.randn(97, 64), torch.randn(97), torch.randn(num_rows, 80)[:, :64]
    expected = torch.nn.functional.linear(inputs.double(), weight.double(), bias.double())
    with torch.inference_mode():
        linear = OnednnLinear(weight, bias)
        torch.testing.assert_close(linear(inputs).double(), expected, atol=1e-4, rtol=1e-5)
        gelu = torch.nn.functional.gelu(expected)
        torch.testing.assert_close(linear.gelu(inputs).double(), gelu, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("num_rows", [1, 5, ROW_TILE, ROW_TILE + 1, 2 * ROW_TILE + 7])
@pytest.mark.parametrize("has_bias", [False, True])
def test_every_tiled_product_has_one_shape_and_the_result_is_that_of_one(
    monkeypatch: pytest.MonkeyPatch, num_rows: int, has_bias: bool
) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(24, 32), torch.randn(24) if has_bias else None
    inputs, residual = torch.randn(num_rows, 32), torch.randn(num_rows, 24)
    shapes = []
    product = torch.mm

    def watched(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        shapes.append((*a.shape, *b.shape))
        return product(a, b, out=out)

    monkeypatch.setattr(torch, "mm", watched)
    with torch.inference_mode():
        plain, tiled = TorchLinear(weight, bias), TiledLinear(weight, bias)
        outputs = tiled(inputs)
        torch.testing.assert_close(outputs, plain(inputs))
        assert set(shapes) == {(ROW_TILE, 32, 32, 24)}
        assert len(shapes) == -(-num_rows // ROW_TILE)
        sums = residual.clone()
        tiled.add_to(sums, inputs)
        torch.testing.assert_close(sums, residual + outputs)
