import pytest
import torch

from weft.engine.kernels.torch.linear import TorchLinear
from weft.engine.kernels.torch.tiled_linear import ROW_TILE, TiledLinear


@pytest.mark.parametrize("num_rows", [1, 5, ROW_TILE, ROW_TILE + 1, 2 * ROW_TILE + 7])
@pytest.mark.parametrize("has_bias", [False, True])
def test_every_product_has_one_shape_and_the_result_is_that_of_one(
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
