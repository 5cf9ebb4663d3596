"""Checks of `weft.engine.kernels.triton.layer_kernels` against float64, on any device: Triton's interpreter or a GPU.

Imported where triton is: by the tests that run interpreted, and by those that need a GPU.
"""

import itertools

import torch
import torch.nn.functional as F

from tests.engine.given_weights import given
from weft.engine.kernels.torch.layer_kernels import CublasLinear
from weft.engine.kernels.triton.layer_kernels import TritonKernels
from weft.engine.kernels.triton.layers import OWN_ACTIVATIONS
from weft.engine.layers.block import PagedCache
from weft.engine.layers.feed_forward import ACTIVATIONS
from weft.engine.layers.norm import HeadNorm, RMSNorm
from weft.engine.layers.rotary import RopeConfig, RotaryTable, rotate

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
HEADS = [(4, 2, 64), (3, 1, 96), (6, 2, 12), (32, 8, 128), (2, 2, 256)]
"""Heads of queries, heads of keys, values per head."""


class Source:
    """Random tensors, the same on every device."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self._device, self._dtype = device, dtype

    def draw(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=self._generator) * scale).to(self._device, self._dtype)


def assert_close(ours: torch.Tensor, exact: torch.Tensor) -> None:
    tolerance = TOLERANCES[ours.dtype]
    torch.testing.assert_close(ours.double(), exact, atol=tolerance, rtol=tolerance)


def check_norm(device: torch.device, dtype: torch.dtype) -> None:
    source = Source(device, dtype)
    for num_tokens, size in ((1, 48), (3, 1000), (5, 7), (2, 4096)):
        hidden, weight = source.draw(num_tokens, size, scale=7.0), source.draw(size)
        ours = TritonKernels().norm(weight, 1e-5)(hidden)
        assert ours.dtype == dtype
        assert_close(ours, RMSNorm(weight.double(), 1e-5)(hidden.double()))
    ours = TritonKernels().norm(1 + weight.float(), 1e-5)(hidden)  # of families that have norms around 1
    assert ours.dtype == dtype
    assert_close(ours, RMSNorm(1 + weight.double(), 1e-5)(hidden.double()))


def check_gated(device: torch.device, dtype: torch.dtype) -> None:
    source = Source(device, dtype)
    for (num_tokens, size), activation in itertools.product(((1, 80), (3, 1500)), OWN_ACTIVATIONS):
        # The matrix only passes its inputs on, or float16 would lose digits before the kernel sees them.
        weight, bias = torch.eye(2 * size, device=device, dtype=dtype), source.draw(2 * size, scale=0.1)
        hidden = source.draw(num_tokens, 2 * size, scale=3.0)
        gate, up = (hidden + bias).double().chunk(2, dim=1)
        assert_close(
            TritonKernels().gated(*given(weight, bias), activation)(hidden), ACTIVATIONS[activation](gate) * up
        )
        gate, up = hidden.double().chunk(2, dim=1)
        assert_close(TritonKernels().gated(*given(weight), activation)(hidden), ACTIVATIONS[activation](gate) * up)


def check_large_gates(device: torch.device, dtype: torch.dtype) -> None:
    hidden = torch.tensor([[6e4, -6e4, 88.0, -88.0, 0.0] + [1.0] * 5], device=device, dtype=dtype)
    for activation, function in [(name, ACTIVATIONS[name]) for name in OWN_ACTIVATIONS]:
        ours = TritonKernels().gated(*given(torch.eye(10, device=device, dtype=dtype)), activation)(hidden)
        assert_close(ours, function(hidden[:, :5].double()))


def check_heads(device: torch.device, dtype: torch.dtype) -> None:
    source = Source(device, dtype)
    for (num_heads, num_kv_heads, head_dim), num_tokens in itertools.product(HEADS, (1, 3)):
        num_rotated = num_heads + num_kv_heads
        table = RotaryTable(RopeConfig(1e4), head_dim, 100, dtype, device)
        rotation = table.gather(torch.tensor([99, 0, 41], device=device)[:num_tokens])
        weights = source.draw(head_dim), source.draw(head_dim)
        if num_tokens == 1:  # Gemma's are the sum of a weight and 1, in float32
            weights = weights[0].float() + 1, weights[1].float() + 1
        exact_norm = HeadNorm(weights[0].double(), weights[1].double(), num_heads, num_kv_heads, 1e-6)
        for norm in (HeadNorm(*weights, num_heads, num_kv_heads, 1e-6), None):
            qkv = source.draw(num_tokens, num_rotated + num_kv_heads, head_dim)
            rotated = qkv[:, :num_rotated].double()
            exact = rotate(exact_norm(rotated) if norm else rotated, rotation.double())
            queries, keys, values = TritonKernels().heads(norm, num_heads, num_kv_heads)(qkv.clone(), rotation, None)
            assert_close(queries, exact[:, :num_heads])
            assert_close(keys, exact[:, num_heads:])
            assert torch.equal(values, qkv[:, num_rotated:])
            check_write(norm, (num_heads, num_kv_heads), qkv, rotation)


def check_write(norm: HeadNorm | None, num_heads: tuple[int, int], qkv: torch.Tensor, rotation: torch.Tensor) -> None:
    """K/V of a token lie in its slot and nowhere else, and a token without one leaves the cache alone."""
    heads, num_kv_heads = TritonKernels().heads(norm, *num_heads), num_heads[1]
    block_size, slots = 4, [9, -1, 2][: len(qkv)]
    blocks = torch.full((3, 2, num_kv_heads, block_size, qkv.size(2)), 7.0, dtype=qkv.dtype, device=qkv.device)
    expected = blocks.clone()
    cache = PagedCache(blocks, torch.tensor(slots, dtype=torch.int32, device=qkv.device), blocks.new_zeros(1))
    parts = heads(qkv.clone(), rotation, cache)
    for part, alone in zip(parts, heads(qkv.clone(), rotation, None), strict=True):
        assert torch.equal(part, alone)
    for token, slot in enumerate(slots):
        if slot >= 0:
            expected[slot // block_size, :, :, slot % block_size] = torch.stack((parts[1][token], parts[2][token]))
    assert torch.equal(blocks, expected)


def check_scaled_write(device: torch.device, dtype: torch.dtype) -> None:
    """What an fp8 cache keeps is divided by the scale of its head, and what attention gets of the step is not."""
    scales = torch.tensor([[3.0, 0.5], [5.0, 24.0]], device=device)
    powers = 2.0 ** (torch.arange(64, device=device) % 8 - 3)  # they are rounded to themselves
    queries, sides = powers.expand(2, 3, 64), powers * scales[:, :, None].expand(2, 2, 2, 64)
    qkv = torch.cat((queries, sides.flatten(1, 2)), 1).to(dtype)
    rotation = torch.tensor([1.0, 0.0], device=device)[:, None].expand(2, 2, 64).contiguous().to(dtype)
    blocks = torch.zeros(2, 2, 2, 4, 64, device=device).to(torch.float8_e4m3fn)
    cache = PagedCache(blocks, torch.tensor([5, 2], dtype=torch.int32, device=device), scales)
    norm = HeadNorm(torch.ones_like(qkv[0, 0]), torch.ones_like(qkv[0, 0]), 3, 2, 1e-6)
    for kind in (norm, None):
        parts = TritonKernels().heads(kind, 3, 2)(qkv.clone(), rotation, cache)
        for token, (block, place) in enumerate(((1, 1), (0, 2))):
            assert torch.equal(blocks.float()[block, 1, :, place], powers.expand(2, 64)), (kind, token)
    assert torch.equal(torch.cat(parts, 1), qkv)
    assert torch.equal(blocks.float()[[1, 0], 0, :, [1, 2]], powers.expand(2, 2, 64))


def check_linear(device: torch.device, dtype: torch.dtype) -> None:
    source = Source(device, dtype)
    for num_tokens, bias in ((1, None), (5, None), (5, source.draw(96, scale=0.1))):
        weight, inputs = source.draw(96, 64, scale=0.1), source.draw(num_tokens, 64)
        residual, linear = source.draw(num_tokens, 96), CublasLinear(weight, bias)
        exact = F.linear(inputs.double(), weight.double(), None if bias is None else bias.double())
        assert_close(linear(inputs), exact)
        logits = linear.to_float32(inputs)
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits.double(), exact, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
        sums = residual.clone()
        linear.add_to(sums, inputs)
        assert_close(sums, exact + residual.double())


def check_rows_are_alone(device: torch.device, dtype: torch.dtype) -> None:
    """A token's outputs are the same, bit for bit, whatever stands beside it."""
    source, kernels = Source(device, dtype), TritonKernels()
    hidden, qkv = source.draw(9, 640), source.draw(9, 8, 64)
    rotation = RotaryTable(RopeConfig(1e4), 64, 9, dtype, device).gather(torch.arange(9, device=device))
    norm, heads = (
        kernels.norm(source.draw(640), 1e-6),
        kernels.heads(HeadNorm(hidden[0, :64], hidden[1, :64], 4, 2, 1e-6), 4, 2),
    )
    normed, queries = norm(hidden), heads(qkv.clone(), rotation, None)[0]
    for row in range(9):
        one = slice(row, row + 1)
        assert torch.equal(norm(hidden[one].clone()), normed[one])
        assert torch.equal(heads(qkv[one].clone(), rotation[one].clone(), None)[0], queries[one])


CHECKS = (
    check_norm,
    check_gated,
    check_large_gates,
    check_heads,
    check_scaled_write,
    check_linear,
    check_rows_are_alone,
)
