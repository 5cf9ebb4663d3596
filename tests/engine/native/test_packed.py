"""int8 against what its definition says, on every instruction set, over sizes that fill panels and tiles or do not."""

import pytest
import torch
import torch.nn.functional as F

from engine.native.layers import NativeKit, NativeLinear
from engine.native.library import NativeLibrary
from tests.engine.native.test_layers import ROWS, SIZES, assert_close, random


def dequantize(weight: torch.Tensor) -> torch.Tensor:
    """What int8 with a scale for each output leaves of a weight, in float64."""
    scales = weight.float().abs().amax(dim=1, keepdim=True) / 127
    return (weight.float() / scales).round().nan_to_num().double() * scales.double()


@pytest.mark.parametrize(("out_features", "in_features"), SIZES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear(library: NativeLibrary, out_features: int, in_features: int, has_bias: bool) -> None:
    torch.manual_seed(0)
    weight, bias = random(out_features, in_features), random(out_features) if has_bias else None
    linear = NativeLinear(library, weight, bias, is_int8=True)
    for num_rows in ROWS:
        # Rows of a wider matrix: inputs may have a stride.
        inputs, residual = random(num_rows, in_features + 16)[:, :in_features], random(num_rows, out_features)
        exact = F.linear(inputs.double(), dequantize(weight), None if bias is None else bias.double())
        assert_close(linear(inputs), exact)
        torch.testing.assert_close(linear.to_float32(inputs).double(), exact, atol=1e-3, rtol=1e-4)
        sums = residual.clone()
        linear.add_to(sums, inputs)
        assert_close(sums, exact + residual.double())


@pytest.mark.parametrize(("inner", "in_features"), SIZES)
def test_gated(library: NativeLibrary, inner: int, in_features: int) -> None:
    torch.manual_seed(0)
    weight = random(2 * inner, in_features) * in_features**-0.5
    gated = NativeKit(library, is_int8=True).gated(weight, None, "silu")
    for num_rows in ROWS:
        inputs = random(num_rows, in_features)
        gate, up = F.linear(inputs.double(), dequantize(weight)).chunk(2, dim=1)
        assert_close(gated(inputs), F.silu(gate) * up)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_row_does_not_feel_the_others(library: NativeLibrary, num_threads: int) -> None:
    torch.manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    linear, inputs = NativeLinear(library, random(200, 160), None, is_int8=True), random(70, 160)
    alone = torch.cat([linear.to_float32(inputs[row : row + 1]) for row in range(70)])
    for num_rows in (2, 9, 16, 17, 33, 70):
        assert torch.equal(linear.to_float32(inputs[:num_rows]), alone[:num_rows])
    torch.set_num_threads(before)


def test_weights_that_int8_holds_are_kept_exactly(library: NativeLibrary) -> None:
    """Then int8 differs from bfloat16 in when it scales, and the scale is a power of two."""
    torch.manual_seed(0)
    weight = torch.randint(-127, 128, (200, 160)).bfloat16() / 64
    weight[:, 7] = 127 / 64
    weight[9] = 0
    plain, quantized = (NativeLinear(library, weight, None, is_int8=is_int8) for is_int8 in (False, True))
    ids = torch.arange(200)
    assert torch.equal(quantized.gather(ids), weight)
    for num_rows in (1, 40):
        inputs = random(num_rows, 160)
        assert torch.equal(quantized.to_float32(inputs), plain.to_float32(inputs))


def test_a_tied_table_gives_its_rows_back(library: NativeLibrary) -> None:
    torch.manual_seed(0)
    table = random(130, 98)
    embedding, head = NativeKit(library, is_int8=True).tied(table)
    ids = torch.randint(0, 130, (100,))
    torch.testing.assert_close(embedding(ids), dequantize(table)[ids].bfloat16(), atol=0, rtol=2**-7)
    inputs = random(2, 98)
    torch.testing.assert_close(
        head.to_float32(inputs).double(), inputs.double() @ dequantize(table).T, atol=1e-3, rtol=1e-4
    )


def test_int8_takes_half_the_memory(library: NativeLibrary) -> None:
    plain, quantized = (NativeLinear(library, random(160, 640), None, is_int8=is_int8) for is_int8 in (False, True))
    assert sum(tensor.nbytes for tensor in plain.matrix.tensors) == 160 * 640 * 2
    assert sum(tensor.nbytes for tensor in quantized.matrix.tensors) == 160 * 640 + 160 * 4
