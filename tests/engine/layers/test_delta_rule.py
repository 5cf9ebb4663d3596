"""The delta rule in chunks and step by step against its definition, in float64."""

import numpy as np
import pytest
import torch

from weft.engine.kernels.cpu.library import NativeLibrary
from weft.engine.kernels.cpu.recurrent import NativeDeltaRule
from weft.engine.kernels.torch.caches import TorchStateStep
from weft.engine.layers.recurrence import DeltaInputs, DeltaRule, delta_rule, delta_scan

HEADS, KEY_DIM = 3, 8

every_kind = pytest.mark.parametrize(
    ("by_channel", "has_rates"), [(False, True), (True, True), (False, False)], ids=["head", "channel", "no rates"]
)


def random_inputs(num_tokens: int, by_channel: bool, has_rates: bool, value_dim: int = 6) -> DeltaInputs:
    """Decays from hardly any to nearly all, keys as layers make them: unit vectors."""
    queries, keys = torch.nn.functional.normalize(torch.randn(2, num_tokens, HEADS, KEY_DIM), dim=-1)
    log_decays = -torch.rand(num_tokens, HEADS, KEY_DIM if by_channel else 1).mul(4).exp().div(10)
    rates = torch.rand(num_tokens, HEADS, 1) * 2 if has_rates else torch.empty(num_tokens, 0)
    return DeltaInputs(queries, keys, torch.randn(num_tokens, HEADS, value_dim), log_decays, rates)


def between(inputs: DeltaInputs, first: int, end: int) -> DeltaInputs:
    return DeltaInputs(*(part[first:end] for part in inputs))


def by_definition(inputs: DeltaInputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and the state afterwards, token by token, in float64."""
    state, outputs = state.double(), []
    for query, key, value, log_decays, rate in zip(*(part.double() for part in inputs), strict=True):
        state = log_decays.exp().unsqueeze(-1) * state
        if len(rate):
            value = rate * (value - torch.einsum("hk,hkv->hv", key, state))
        state = state + torch.einsum("hk,hv->hkv", key, value)
        outputs.append(torch.einsum("hk,hkv->hv", query, state))
    return torch.stack(outputs), state


def assert_close(ours: torch.Tensor, exact: torch.Tensor) -> None:
    torch.testing.assert_close(ours.double(), exact.double(), atol=2e-5, rtol=1e-4)


@every_kind
@pytest.mark.parametrize("num_tokens", [1, 17, 64, 150])
def test_chunks_equal_the_definition(num_tokens: int, by_channel: bool, has_rates: bool) -> None:
    torch.manual_seed(num_tokens)
    inputs, state = random_inputs(num_tokens, by_channel, has_rates), torch.randn(HEADS, KEY_DIM, 6)
    for ours, exact in zip(delta_scan(*inputs, state[None]), by_definition(inputs, state), strict=True):
        assert_close(ours.view_as(exact), exact)


@every_kind
@pytest.mark.parametrize("cut", [1, 30, 99])
def test_where_a_prompt_is_cut_does_not_matter(cut: int, by_channel: bool, has_rates: bool) -> None:
    torch.manual_seed(0)
    inputs, state = random_inputs(100, by_channel, has_rates), torch.randn(1, HEADS, KEY_DIM, 6)
    expected, after = delta_scan(*inputs, state)
    first, middle = delta_scan(*between(inputs, 0, cut), state)
    second, last = delta_scan(*between(inputs, cut, 100), middle)
    assert_close(torch.cat((first, second)), expected)
    assert_close(last, after)


def check_step(rule: DeltaRule, counts: tuple[int, ...], inputs: DeltaInputs) -> None:
    """Each request is computed from its own state, zero if it is new; other slots are left alone."""
    value_dim, num_requests = inputs.values.size(-1), len(counts)
    starts = np.cumsum((0, *counts), dtype=np.int64)
    tensor, slots = torch.randn(num_requests + 2, HEADS, KEY_DIM, value_dim), torch.randperm(num_requests) + 1
    is_new = torch.arange(num_requests) % 2 == 0
    before = tensor.clone()
    tensor[slots[is_new]] = torch.nan
    outputs = rule(inputs, TorchStateStep({7: tensor}, {7: slots}, is_new, starts), 7)
    for index, slot in enumerate(slots):
        first, end = starts[index : index + 2]
        state = torch.zeros_like(before[slot]) if is_new[index] else before[slot]
        expected, after = by_definition(between(inputs, first, end), state)
        assert_close(outputs[first:end], expected)
        assert_close(tensor[slot], after)
    assert torch.equal(tensor[[0, -1]], before[[0, -1]])


@every_kind
@pytest.mark.parametrize("counts", [(1, 1, 70, 1, 40), (1, 1, 1, 1)], ids=str)
def test_a_step(counts: tuple[int, ...], by_channel: bool, has_rates: bool) -> None:
    torch.manual_seed(0)
    check_step(delta_rule, counts, random_inputs(sum(counts), by_channel, has_rates))


@every_kind
@pytest.mark.parametrize("value_dim", [6, 80])
@pytest.mark.parametrize("counts", [(1, 1, 20), (1, 1, 1, 1)], ids=str)
def test_a_native_step(
    library: NativeLibrary, counts: tuple[int, ...], value_dim: int, by_channel: bool, has_rates: bool
) -> None:
    torch.manual_seed(0)
    check_step(NativeDeltaRule(library), counts, random_inputs(sum(counts), by_channel, has_rates, value_dim))
