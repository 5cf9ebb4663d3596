"""Every instruction set against torch's operations, over steps of decodes, prompts and both."""

import pytest
import torch

from tests.engine.layers.given_states import GivenStates
from weft.engine.kernels.cpu.library import NativeLibrary
from weft.engine.kernels.cpu.recurrent import NativeConvolution, NativeSelectiveScan, NativeStateSpaceScan
from weft.engine.layers.recurrence import CausalConvolution, SelectiveScan, StateSpace, StateSpaceScan

steps = pytest.mark.parametrize("counts", [(1,), (1, 1, 1), (1, 9, 1), (70, 2)], ids=str)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


def given(counts: tuple[int, ...], *shape: int) -> tuple[GivenStates, GivenStates]:
    """The same states twice; the second request, if there is one, is new, and its slot holds what another left."""
    before = torch.randn(len(counts), *shape)
    pair = GivenStates.of(before, *counts), GivenStates.of(before, *counts)
    for states in pair:
        states.is_new[1:2] = True
        states.states[states.slots(0)[states.is_new]] = torch.nan
    return pair


def assert_equal_states(native: GivenStates, plain: GivenStates) -> None:
    torch.testing.assert_close(native.states, plain.states, atol=1e-5, rtol=1e-5, equal_nan=True)


@steps
@pytest.mark.parametrize(("kernel", "has_bias", "has_silu"), [(4, True, True), (3, False, False), (2, True, False)])
def test_convolution(
    library: NativeLibrary, counts: tuple[int, ...], kernel: int, has_bias: bool, has_silu: bool
) -> None:
    torch.manual_seed(0)
    channels = 48
    weight, bias = torch.randn(channels, kernel), torch.randn(channels) if has_bias else None
    native, plain = given(counts, channels, kernel - 1)
    inputs = random(sum(counts), channels + 5)[:, :channels]  # a part of what a matrix makes
    outputs = NativeConvolution(library, weight, bias, has_silu=has_silu).step(inputs, native, 0)
    expected = CausalConvolution(weight, bias, has_silu=has_silu).step(inputs, plain, 0)
    torch.testing.assert_close(outputs, expected, atol=1e-3, rtol=1e-2)  # an ulp of bfloat16
    assert_equal_states(native, plain)


@steps
@pytest.mark.parametrize("has_gate", [True, False])
def test_state_space(library: NativeLibrary, counts: tuple[int, ...], has_gate: bool) -> None:
    torch.manual_seed(0)
    heads, head_dim, state_size, groups = 6, 16, 32, 2
    parameters = -torch.rand(heads) * 9, torch.randn(heads), torch.randn(heads) * 4
    space = StateSpace(
        *(head_dim, state_size, groups, *parameters), time_scale=0.6, time_limits=(0.02, 3.0), gate_scale=1.4
    )
    native, plain = given(counts, heads, head_dim, state_size)
    width, num_tokens = heads * head_dim, sum(counts)
    channels = random(num_tokens, width + 2 * groups * state_size)
    projected = random(num_tokens, width + heads)
    times, gate = projected[:, width:], projected[:, :width] if has_gate else None
    outputs = NativeStateSpaceScan(library, space)(channels, times, gate, native, 0)
    expected = StateSpaceScan(space)(channels, times, gate, plain, 0)
    torch.testing.assert_close(outputs, expected, atol=1e-3, rtol=1e-2)
    assert_equal_states(native, plain)


@steps
@pytest.mark.parametrize(("channels", "state_size"), [(80, 16), (64, 32)])
def test_selective_scan(library: NativeLibrary, counts: tuple[int, ...], channels: int, state_size: int) -> None:
    torch.manual_seed(0)
    parameters = -torch.rand(channels, state_size) * 9, torch.randn(channels), torch.randn(channels)
    native, plain = given(counts, channels, state_size)
    num_tokens = sum(counts)
    x, times, gate = random(num_tokens, channels), random(num_tokens, channels), random(num_tokens, 2 * channels)
    selected = random(num_tokens, 3 + 2 * state_size)[:, 3:].split_with_sizes((state_size, state_size), 1)
    arguments = (x, times, (selected[0], selected[1]), gate[:, channels:])
    outputs = NativeSelectiveScan(library, *parameters)(*arguments, native, 0)
    expected = SelectiveScan(*parameters)(*arguments, plain, 0)
    torch.testing.assert_close(outputs, expected, atol=1e-3, rtol=1e-2)
    assert_equal_states(native, plain)
