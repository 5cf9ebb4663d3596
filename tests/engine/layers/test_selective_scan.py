import pytest
import torch
import torch.nn.functional as F

from tests.engine.layers.given_states import GivenStates
from weft.engine.layers.recurrence import SelectiveScan

CHANNELS, STATE = 6, 5


def random_scan() -> SelectiveScan:
    torch.manual_seed(0)
    return SelectiveScan(-torch.rand(CHANNELS, STATE) * 20, torch.randn(CHANNELS), torch.randn(CHANNELS))


def plain(
    scan: SelectiveScan,
    x: torch.Tensor,
    times: torch.Tensor,
    selection: tuple[torch.Tensor, torch.Tensor],
    gate: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence of one request as the paper writes it, token by token, in float64."""
    outputs = []
    state = state.double()
    for inputs, time, b, c, z in zip(*(part.double() for part in (x, times, *selection, gate)), strict=True):
        step = F.softplus(time + scan.time_bias.double())[:, None]
        state = (step * scan.decays.double()).exp() * state + step * inputs.outer(b)
        outputs.append((state @ c + scan.skips.double() * inputs) * F.silu(z))
    return torch.stack(outputs).float(), state.float()


@pytest.mark.parametrize("counts", [(1, 1, 1), (1, 70, 1, 1, 2), (130,)], ids=str)
def test_a_step_equals_the_recurrence_of_each_request(counts: tuple[int, ...]) -> None:
    scan = random_scan()
    x, times, gate = (torch.randn(sum(counts), CHANNELS) for _ in range(3))
    selection = torch.randn(sum(counts), STATE), torch.randn(sum(counts), STATE)
    before = torch.randn(len(counts), CHANNELS, STATE)
    states = GivenStates.of(before, *counts)
    outputs = scan(x, times, selection, gate, states, 0)
    b, c = (part.split(counts) for part in selection)
    for index, output in enumerate(outputs.split(counts)):
        parts = (x.split(counts)[index], times.split(counts)[index], (b[index], c[index]), gate.split(counts)[index])
        expected, after = plain(scan, *parts, before[index])
        torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(states.read(0)[index], after, atol=1e-5, rtol=1e-5)
