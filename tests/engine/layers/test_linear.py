import gc
import weakref

import pytest
import torch

from engine.layers.linear import Linear, OnednnKernel, PlainKernel, choose_packer, keep_plain, pack_onednn

CPU = torch.device("cpu")
needs_bfloat16 = pytest.mark.skipif(
    choose_packer(CPU, torch.bfloat16) is not pack_onednn, reason="the CPU has no bfloat16 instructions"
)


@needs_bfloat16
@pytest.mark.parametrize("num_rows", [1, 5, 64])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_packed_layer_computes_the_same(num_rows: int, has_bias: bool) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(96, 64).bfloat16(), torch.randn(96).bfloat16() if has_bias else None
    inputs = torch.randn(num_rows, 64).bfloat16()
    linear = Linear(weight, bias)
    expected = torch.nn.functional.linear(inputs.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(linear(inputs).double(), expected, atol=0.1, rtol=0.01)
    with torch.inference_mode():
        pack_onednn(linear)
        assert isinstance(linear.kernel, OnednnKernel)
        torch.testing.assert_close(linear(inputs).double(), expected, atol=0.1, rtol=0.01)


@needs_bfloat16
def test_packing_frees_the_plain_weight() -> None:
    linear = Linear(torch.randn(32, 16).bfloat16())
    assert isinstance(linear.kernel, PlainKernel)
    weight = weakref.ref(linear.kernel.weight)
    pack_onednn(linear)
    gc.collect()
    assert weight() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_other_dtypes_and_devices_stay_plain(dtype: torch.dtype) -> None:
    assert choose_packer(CPU, dtype) is keep_plain
    assert choose_packer(torch.device("cuda"), torch.bfloat16) is keep_plain
    linear = Linear(torch.randn(4, 2, dtype=dtype))
    kernel = linear.kernel
    keep_plain(linear)
    assert linear.kernel is kernel
