import pytest
import torch
import torch.nn.functional as F

from tests.engine.layers.given_states import GivenStates
from weft.engine.layers.recurrence import StateSpace, StateSpaceScan

HEADS, HEAD_DIM, STATE, GROUPS = 4, 3, 5, 2
CHANNELS = HEADS * HEAD_DIM + 2 * GROUPS * STATE


def random_space() -> StateSpace:
    torch.manual_seed(0)
    decays = -torch.tensor([0.01, 1.0, 30.0, 100.0])
    return StateSpace(
        *(HEAD_DIM, STATE, GROUPS, decays, torch.randn(HEADS), torch.randn(HEADS)),
        time_scale=0.7,
        time_limits=(0.05, 2.0),
        gate_scale=1.3,
    )


def plain(
    space: StateSpace, channels: torch.Tensor, times: torch.Tensor, gate: torch.Tensor | None, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence of one request as the paper writes it, token by token, in float64."""
    outputs = []
    state = state.double()
    for token, (channel, time) in enumerate(zip(channels.double(), times.double(), strict=True)):
        x, b, c = channel.split_with_sizes((HEADS * HEAD_DIM, GROUPS * STATE, GROUPS * STATE))
        output = torch.empty(HEADS, HEAD_DIM, dtype=torch.double)
        for head in range(HEADS):
            group = slice(head // 2 * STATE, (head // 2 + 1) * STATE)
            inputs = x[head * HEAD_DIM : (head + 1) * HEAD_DIM]
            step = F.softplus(time[head] * 0.7 + space.time_bias[head].double()).clamp(0.05, 2.0)
            state[head] = state[head] * (step * space.decays[head].double()).exp() + step * inputs.outer(b[group])
            output[head] = state[head] @ c[group] + space.skips[head].double() * inputs
        flat = output.flatten()
        outputs.append(flat if gate is None else flat * F.silu(gate[token].double() * 1.3))
    return torch.stack(outputs).float(), state.float()


@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize("counts", [(1, 1, 1), (1, 70, 1, 1, 2), (200,)], ids=str)
def test_a_step_equals_the_recurrence_of_each_request(counts: tuple[int, ...], is_gated: bool) -> None:
    space = random_space()
    channels, times = torch.randn(sum(counts), CHANNELS), torch.randn(sum(counts), HEADS)
    gate = torch.randn(sum(counts), HEADS * HEAD_DIM) if is_gated else None
    before = torch.randn(len(counts), HEADS, HEAD_DIM, STATE)
    states = GivenStates.of(before, *counts)
    outputs = StateSpaceScan(space)(channels, times, gate, states, 0)
    gates = [None] * len(counts) if gate is None else gate.split(counts)
    parts = zip(channels.split(counts), times.split(counts), gates, before, strict=True)
    for (expected, after), output, read in zip(
        (plain(space, *part) for part in parts), outputs.split(counts), states.read(0), strict=True
    ):
        torch.testing.assert_close(output, expected, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(read, after, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("cuts", [(100,), (1, 99), (64, 36), (33, 1, 66)], ids=str)
def test_a_prompt_in_any_chunks_gives_the_same_state(cuts: tuple[int, ...]) -> None:
    space = random_space()
    channels, times = torch.randn(100, CHANNELS), torch.randn(100, HEADS)
    expected, after = plain(space, channels, times, None, torch.zeros(HEADS, HEAD_DIM, STATE))
    states = GivenStates.of(torch.full((1, HEADS, HEAD_DIM, STATE), torch.nan))
    outputs = []
    for index, (channel, time) in enumerate(zip(channels.split(cuts), times.split(cuts), strict=True)):
        step = GivenStates.of(states.read(0), len(channel))
        step.is_new.fill_(index == 0)
        outputs.append(StateSpaceScan(space)(channel, time, None, step, 0))
        states = step
        states.is_new.fill_(False)
    torch.testing.assert_close(torch.cat(outputs), expected, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(states.read(0)[0], after, atol=2e-5, rtol=1e-5)
