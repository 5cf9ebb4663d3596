"""Every instruction set against float64, over sizes that fill panels, tiles and blocks, and that do not."""

import os
import random as random_module
import time

import pytest
import torch
import torch.nn.functional as F

from tests.engine.given_weights import given
from weft.engine.kernels.cpu.layer_kernels import CpuKernels
from weft.engine.kernels.cpu.layers import GATES, NativeLayerNorm, NativeLinear
from weft.engine.kernels.cpu.library import NativeLibrary
from weft.engine.layers.feed_forward import ACTIVATIONS
from weft.engine.layers.norm import HeadNorm, RMSNorm
from weft.engine.layers.rotary import RopeConfig, RotaryTable, rotate

ROWS = (1, 2, 3, 4, 5, 8, 12, 13, 16, 17, 31, 32, 33, 49, 70, 600)
CHANCE = random_module.Random(0)
SIZES = [
    *((16, 32), (40, 64), (96, 48), (130, 256), (64, 98), (16 * 9, 1024)),
    *((CHANCE.randint(1, 300), 2 * CHANCE.randint(1, 300)) for _ in range(4)),
]
"""Outputs and inputs, the latter even."""


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


def assert_close(ours: torch.Tensor, exact: torch.Tensor) -> None:
    """Within the rounding of a bfloat16 result; the sums themselves are float32."""
    torch.testing.assert_close(ours.double(), exact, atol=0.02, rtol=0.006)


@pytest.mark.parametrize(("out_features", "in_features"), SIZES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear(library: NativeLibrary, out_features: int, in_features: int, has_bias: bool) -> None:
    torch.manual_seed(0)
    weight, bias = random(out_features, in_features), random(out_features) if has_bias else None
    linear = NativeLinear(library, weight, bias)
    for num_rows in ROWS:
        # Rows of a wider matrix: inputs may have a stride.
        inputs, residual = random(num_rows, in_features + 16)[:, :in_features], random(num_rows, out_features)
        exact = F.linear(inputs.double(), weight.double(), None if bias is None else bias.double())
        assert_close(linear(inputs), exact)
        torch.testing.assert_close(linear.to_float32(inputs).double(), exact, atol=1e-3, rtol=1e-4)
        sums = residual.clone()
        assert_close(linear.gelu(inputs), F.gelu(exact))
        linear.add_to(sums, inputs)
        assert_close(sums, exact + residual.double())


def test_what_is_packed_beside_steps_is_packed_alike(library: NativeLibrary) -> None:
    for shape in ((50, 40), (64, 64)):
        weight = random(*shape)
        plain, beside = (NativeLinear(library, weight, None, is_beside_steps=is_beside) for is_beside in (False, True))
        assert torch.equal(plain.matrix.tensors[0], beside.matrix.tensors[0])


@pytest.mark.parametrize("activation", GATES)
@pytest.mark.parametrize(("inner", "in_features"), SIZES)
def test_gated(library: NativeLibrary, inner: int, in_features: int, activation: str) -> None:
    torch.manual_seed(0)
    weight = random(2 * inner, in_features) * in_features**-0.5
    gated = CpuKernels(library).gated(*given(weight), activation)
    assert isinstance(gated, NativeLinear)
    for num_rows in ROWS:
        inputs = random(num_rows, in_features)
        gate, up = F.linear(inputs.double(), weight.double()).chunk(2, dim=1)
        assert_close(gated(inputs), ACTIVATIONS[activation](gate) * up)


def test_silu_of_large_values_stays_finite(library: NativeLibrary) -> None:
    weight = torch.cat((torch.eye(16), torch.ones(16, 16))).bfloat16()
    inputs = torch.zeros(4, 16).bfloat16()
    inputs[0, 0], inputs[1, 0], inputs[2, 0], inputs[3, 0] = 1e4, -1e4, 88.5, -87.5
    gate, up = F.linear(inputs.double(), weight.double()).chunk(2, dim=1)
    ours = CpuKernels(library).gated(*given(weight), "silu")(inputs)
    torch.testing.assert_close(ours.double(), F.silu(gate) * up, atol=1e-30, rtol=0.01)


def test_other_activations_take_the_plain_way(library: NativeLibrary) -> None:
    torch.manual_seed(0)
    weight, bias, inputs = random(64, 32), random(64), random(3, 32)
    gate, up = F.linear(inputs.double(), weight.double(), bias.double()).chunk(2, dim=1)
    ours = CpuKernels(library).gated(*given(weight, bias), "gelu")(inputs).double()
    torch.testing.assert_close(ours, F.gelu(gate) * up, atol=0.05, rtol=0.02)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_row_does_not_feel_the_others(library: NativeLibrary, num_threads: int) -> None:
    torch.manual_seed(0)
    library.set_num_threads(num_threads)
    linear, inputs = NativeLinear(library, random(200, 160), None), random(70, 160)
    alone = torch.cat([linear.to_float32(inputs[row : row + 1]).clone() for row in range(70)])
    for num_rows in (*range(2, 14), 16, 17, 33, 70):
        assert torch.equal(linear.to_float32(inputs[:num_rows]), alone[:num_rows])


def test_calls_in_quick_succession_on_changing_numbers_of_threads(library: NativeLibrary) -> None:
    """Threads come late, early and in vain; whoever comes, all is computed, and nobody waits for ever."""
    torch.manual_seed(0)
    chance = random_module.Random(0)
    linear, inputs = NativeLinear(library, random(400, 64), None), random(40, 64)
    expected = linear.to_float32(inputs).clone()
    for index in range(3000):
        if index % 100 == 0:
            library.set_num_threads(chance.randint(1, 5))
            time.sleep(chance.choice((0, 0.002)))  # long enough for threads to sleep
        num_rows = chance.choice((1, 2, 17, 40))
        assert torch.equal(linear.to_float32(inputs[:num_rows]), expected[:num_rows])


def test_a_call_takes_as_many_threads_as_it_may(library: NativeLibrary) -> None:
    linear, inputs = NativeLinear(library, random(400, 64), None), random(40, 64)

    def threads(number: int) -> set[str]:
        library.set_num_threads(number)
        linear(inputs)
        return set(os.listdir("/proc/self/task"))

    before = threads(9)
    new = threads(12) - before
    assert len(new) == 3
    now = threads(9)
    assert new <= now  # they stay for later calls
    assert not now - before - new


def test_a_tied_table_gives_its_rows_back(library: NativeLibrary) -> None:
    torch.manual_seed(0)
    table = random(130, 98)
    embedding, head = CpuKernels(library).tied(*given(table))
    ids = torch.randint(0, 130, (100,))
    assert torch.equal(embedding(ids), table[ids])
    inputs = random(2, 98)
    logits = inputs.double() @ table.double().T
    torch.testing.assert_close(head.to_float32(inputs).double(), logits, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_rows", [1, 40])
def test_norm(library: NativeLibrary, num_rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    inputs, weight = random(num_rows, 1040), torch.randn(1040).to(dtype)
    exact = RMSNorm(weight.double(), 1e-6)(inputs.double())
    assert_close(CpuKernels(library).norm(weight, 1e-6)(inputs), exact)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float32], ids=lambda dtype: f"norm {dtype}")
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("num_tokens", [1, 33])
def test_heads(library: NativeLibrary, dtype: torch.dtype | None, head_dim: int, num_tokens: int) -> None:
    torch.manual_seed(0)
    norm = HeadNorm(*torch.randn(2, head_dim).to(dtype), 4, 2, 1e-6) if dtype else None
    qkv, positions = random(num_tokens, 8, head_dim), torch.randint(0, 100, (num_tokens,))
    rotation = RotaryTable(RopeConfig(1e4), head_dim, 100, torch.bfloat16, torch.device("cpu")).gather(positions)
    normed = qkv[:, :6].double()
    if norm is not None:
        normed = HeadNorm(norm.weight[0].double(), norm.weight[-1].double(), 4, 2, 1e-6)(normed)
    exact = rotate(normed, rotation.double())
    queries, keys, values = CpuKernels(library).heads(norm, 4, 2)(qkv.clone(), rotation)
    assert_close(queries, exact[:, :4])
    assert_close(keys, exact[:, 4:])
    assert torch.equal(values, qkv[:, 6:])


def test_logits_take_memory_once(library: NativeLibrary) -> None:
    linear = NativeLinear(library, torch.randn(96, 64).bfloat16(), None)
    inputs = torch.randn(8, 64).bfloat16()
    first = linear.to_float32(inputs)
    expected = first[:3].clone()
    again = linear.to_float32(inputs[:3])
    assert again.data_ptr() == first.data_ptr() and torch.equal(again, expected)


@pytest.mark.parametrize("has_bias", [False, True])
def test_layer_norm(library: NativeLibrary, has_bias: bool) -> None:
    """Also far from zero, where the mean is large beside the deviation."""
    torch.manual_seed(0)
    weight, bias = random(48), random(48) if has_bias else None
    norm = CpuKernels(library).layer_norm(weight, bias, 1e-5)
    assert isinstance(norm, NativeLayerNorm)
    for num_rows in (0, 1, 7, 600):
        inputs = (random(num_rows, 64) * 3 + 20)[:, :48]
        exact_bias = None if bias is None else bias.double()
        assert_close(norm(inputs), F.layer_norm(inputs.double(), (48,), weight.double(), exact_bias, 1e-5))
