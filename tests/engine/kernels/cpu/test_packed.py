"""What is special about int8; that it computes what it should is tested with the layers."""

import torch

from tests.engine.kernels.cpu.test_layers import PLAIN_STORAGES, random
from weft.engine.kernels.cpu.layers import NativeLinear
from weft.engine.kernels.cpu.library import NativeLibrary


def test_weights_that_int8_holds_are_kept_exactly(library: NativeLibrary) -> None:
    """Then int8 differs from bfloat16 in when it scales, and the scale is a power of two."""
    torch.manual_seed(0)
    weight = torch.randint(-127, 128, (200, 160)).bfloat16() / 64
    weight[:, 7] = 127 / 64
    weight[9] = 0
    plain, quantized = (NativeLinear(library, weight, None, storage=storage) for storage in PLAIN_STORAGES)
    ids = torch.arange(200)
    assert torch.equal(quantized.gather(ids), weight)
    for num_rows in (1, 40):
        inputs = random(num_rows, 160)
        assert torch.equal(quantized.to_float32(inputs), plain.to_float32(inputs))


def test_int8_takes_half_the_memory(library: NativeLibrary) -> None:
    plain, quantized = (NativeLinear(library, random(160, 640), None, storage=storage) for storage in PLAIN_STORAGES)
    assert sum(tensor.nbytes for tensor in plain.matrix.tensors) == 160 * 640 * 2
    assert sum(tensor.nbytes for tensor in quantized.matrix.tensors) == 160 * 640 + 160 * 4
