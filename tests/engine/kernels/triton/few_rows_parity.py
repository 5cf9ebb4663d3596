"""Checks of `weft.engine.kernels.triton.layers` against float64, on any device: Triton's interpreter or a GPU."""

import itertools

import torch
import torch.nn.functional as F

from tests.engine.given_weights import given
from tests.engine.kernels.triton.layer_parity import Source, assert_close
from weft.engine.kernels.triton.layer_kernels import TritonKernels
from weft.engine.kernels.triton.layers import (
    MAX_ROWS,
    OWN_ACTIVATIONS,
    FewRowsGated,
    FewRowsLinear,
    GatedActivation,
    TritonNorm,
    supports,
)
from weft.engine.kernels.triton.layers_jit import supports_dependent_launch
from weft.engine.layers.block import (
    Attention,
    AttentionStep,
    BlockStep,
    GatedFeedForward,
    Heads,
    PreNormBlock,
    StepCaches,
)
from weft.engine.layers.feed_forward import ACTIVATIONS
from weft.engine.layers.norm import RMSNorm

SHAPES = ((24, 48), (19, 1200))
"""Rows and columns of a matrix: less than a tile, and more than one but no multiple of it."""


def numbers_of_rows(device: torch.device, dtype: torch.dtype) -> list[int]:
    """All that the kernel takes, and one more. In a dot, Triton's interpreter takes bfloat16 for integers."""
    is_broken = device.type == "cpu" and dtype == torch.bfloat16
    return [rows for rows in range(1, MAX_ROWS + 2) if not is_broken or not 2 < rows <= MAX_ROWS]


def make_kernels(device: torch.device) -> TritonKernels:
    return TritonKernels(few_rows=MAX_ROWS, is_dependent=supports_dependent_launch(device))


class Counted(FewRowsLinear):
    """Knows how often the kernel ran, so that cuBLAS cannot stand in for it."""

    calls = 0

    def multiply(self, *args: torch.Tensor, **options: object) -> torch.Tensor:
        self.calls += 1
        return super().multiply(*args, **options)  # type: ignore[arg-type]


def check_products(device: torch.device, dtype: torch.dtype) -> None:
    source = Source(device, dtype)
    for (out_features, in_features), num_rows in itertools.product(SHAPES, numbers_of_rows(device, dtype)):
        weight = source.draw(out_features, in_features, scale=in_features**-0.5)
        bias = source.draw(out_features) if num_rows % 2 else None
        linear = Counted(weight, bias, MAX_ROWS, supports_dependent_launch(device))
        inputs = source.draw(num_rows, in_features + 16)[:, :in_features]
        residual = source.draw(num_rows, out_features)
        exact = F.linear(inputs.double(), weight.double(), None if bias is None else bias.double())
        assert_close(linear(inputs), exact)
        logits = linear.to_float32(inputs)
        assert logits.dtype == torch.float32
        if num_rows <= MAX_ROWS:  # the sums were never rounded to 16 bits
            torch.testing.assert_close(logits.double(), exact, atol=1e-5, rtol=1e-5)
        sums = residual.clone()
        linear.add_to(sums, inputs)
        assert_close(sums, exact + residual.double())
        assert linear.calls == (3 if num_rows <= MAX_ROWS else 0)


def check_gated(device: torch.device, dtype: torch.dtype) -> None:
    source = Source(device, dtype)
    size, in_features, numbers = 14, 528, numbers_of_rows(device, dtype)[:-1]  # cuBLAS rounds before the activation
    for activation, num_rows in itertools.product(OWN_ACTIVATIONS, numbers):
        weight = source.draw(2 * size, in_features, scale=in_features**-0.5)
        bias, hidden = source.draw(2 * size, scale=0.1), source.draw(num_rows, in_features, scale=3.0)
        gate, up = F.linear(hidden.double(), weight.double(), bias.double()).chunk(2, dim=1)
        layer = make_kernels(device).gated(*given(weight, bias), activation)
        assert_close(layer(hidden), ACTIVATIONS[activation](gate) * up)


def check_fused_norms(device: torch.device, dtype: torch.dtype) -> None:
    source = Source(device, dtype)
    in_features, is_dependent = 1040, supports_dependent_launch(device)
    for num_rows in numbers_of_rows(device, dtype)[:-1]:
        weight = source.draw(20, in_features, scale=in_features**-0.5)
        hidden, norm_weight = source.draw(num_rows, in_features, scale=7.0), source.draw(in_features)
        if num_rows % 2:
            norm_weight = 1 + norm_weight.float()  # of families that have norms around 1
        linear = FewRowsLinear(weight, None, MAX_ROWS, is_dependent, TritonNorm(norm_weight, 1e-5, is_dependent))
        exact = RMSNorm(norm_weight.double(), 1e-5)(hidden.double()) @ weight.double().t()
        assert_close(linear(hidden), exact)
        gate, up = exact.chunk(2, dim=1)
        assert_close(FewRowsGated(linear, GatedActivation("silu", is_dependent))(hidden), F.silu(gate) * up)


def check_choice(device: torch.device, dtype: torch.dtype) -> None:
    """What the kernel cannot read, cuBLAS multiplies."""
    source = Source(device, dtype)
    wide = source.draw(24, 80)
    unsupported = (wide[:, :64], wide[:, :24].contiguous(), wide.view(-1)[1:1537].view(24, 64), wide.float())
    assert supports(wide)
    assert [supports(weight) for weight in unsupported] == [False] * len(unsupported)
    for weight in unsupported:
        linear = Counted(weight, None, MAX_ROWS, False)
        inputs = source.draw(2, weight.size(1)).to(weight.dtype)
        assert_close(linear(inputs), inputs.double() @ weight.double().t())
        assert linear.calls == 0
    linear = Counted(wide, None, MAX_ROWS, False)
    inputs = source.draw(80, 3).t()
    assert_close(linear(inputs), inputs.double() @ wide.double().t())
    assert linear.calls == 0


class OwnValues(AttentionStep):
    """Attention of tokens to themselves alone."""

    def cache(self, layer: int) -> None:
        return None

    def attend(
        self, layer: int, heads: Heads, sinks: torch.Tensor | None = None, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        queries, _, values = heads
        return values.repeat_interleave(queries.size(1) // values.size(1), dim=1) + queries


def check_block(device: torch.device, dtype: torch.dtype) -> None:
    """A block with fused norms computes the same as one of single launches. In float16 norms stay single launches."""
    source = Source(device, dtype)
    num_heads, num_kv_heads, head_dim, hidden_size, size = 2, 1, 16, 32, 48
    qkv = source.draw((num_heads + 2 * num_kv_heads) * head_dim, hidden_size, scale=0.1)
    o, down = source.draw(hidden_size, num_heads * head_dim, scale=0.1), source.draw(hidden_size, size, scale=0.1)
    gate_up, norms = source.draw(2 * size, hidden_size, scale=0.1), source.draw(2, hidden_size)
    each = TritonKernels(), make_kernels(device)
    blocks = []
    for kernels in each:
        attention = Attention(
            kernels.linear(*given(qkv)),
            kernels.heads(None, num_heads, num_kv_heads),
            kernels.linear(*given(o)),
            head_dim,
            0,
        )
        forward = GatedFeedForward(kernels.gated(*given(gate_up), "silu"), kernels.linear(*given(down)))
        blocks.append(PreNormBlock(kernels.norm(norms[0], 1e-6), attention, kernels.norm(norms[1], 1e-6), forward))
    single, fused = blocks[0], each[1].fuse(blocks[1:])[0]
    assert isinstance(fused, PreNormBlock)
    norms_left = [isinstance(norm, TritonNorm) for norm in (fused.mixer_norm, fused.feed_forward_norm)]
    assert norms_left == [dtype == torch.float16] * 2
    assert each[0].fuse([single]) == [single]
    rotation = source.draw(MAX_ROWS + 1, 2, 1, head_dim)
    for num_rows in numbers_of_rows(device, dtype)[::2]:
        step = BlockStep((rotation[:num_rows],), StepCaches(OwnValues(), None))
        hidden = source.draw(num_rows, hidden_size)
        torch.testing.assert_close(
            fused.forward(hidden.clone(), step), single.forward(hidden.clone(), step), atol=0.06, rtol=0.02
        )


def check_early_starts(device: torch.device) -> None:
    """Kernels that start early change no bit. Each reads what the one before wrote, and writes what it read."""
    source, size = Source(device, torch.bfloat16), 2048
    gate_up, down = source.draw(4 * size, size, scale=size**-0.5), source.draw(size, 2 * size, scale=size**-0.5)
    norm_weight, start = source.draw(size), source.draw(MAX_ROWS, size)

    def run(num_rows: int, *, is_dependent: bool) -> torch.Tensor:
        kernels = TritonKernels(few_rows=MAX_ROWS, is_dependent=is_dependent)
        norm, gated, linear = (
            kernels.norm(norm_weight, 1e-6),
            kernels.gated(*given(gate_up), "silu"),
            kernels.linear(*given(down)),
        )
        hidden = start[:num_rows].clone()
        for _ in range(50):
            linear.add_to(hidden, gated(norm(hidden)))
        return hidden

    for num_rows in (1, 2, MAX_ROWS):
        expected = run(num_rows, is_dependent=False)
        for _ in range(20):
            assert torch.equal(run(num_rows, is_dependent=True), expected)


CHECKS = (check_products, check_gated, check_fused_norms, check_choice, check_block)
