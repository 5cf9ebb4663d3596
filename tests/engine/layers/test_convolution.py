import pytest
import torch
import torch.nn.functional as F

from tests.engine.layers.given_states import starts_of
from weft.engine.layers.recurrence import CausalConvolution

CHANNELS = 6


def random_layer(kernel: int, has_silu: bool = True) -> CausalConvolution:
    torch.manual_seed(kernel)
    return CausalConvolution(torch.randn(CHANNELS, kernel), torch.randn(CHANNELS), has_silu=has_silu)


def plain(layer: CausalConvolution, inputs: torch.Tensor) -> torch.Tensor:
    """Torch's convolution over one request from its first token on, and SiLU."""
    padded = F.pad(inputs.t(), (len(layer.taps) - 1, 0))
    return F.silu(F.conv1d(padded, layer.weight[:, None], layer.bias, groups=CHANNELS)).t()


@pytest.mark.parametrize("kernel", [2, 3, 4])
@pytest.mark.parametrize("cuts", [(1, 1, 1, 1, 1), (5,), (1, 4), (2, 3), (3, 1, 1)], ids=str)
def test_any_chunks_give_the_outputs_of_the_whole_prompt(kernel: int, cuts: tuple[int, ...]) -> None:
    layer = random_layer(kernel)
    inputs = torch.randn(5, CHANNELS)
    state = torch.zeros(1, CHANNELS, len(layer.taps) - 1)
    outputs = []
    for chunk in inputs.split(cuts):
        output, state = layer(chunk, state, starts_of(len(chunk)))
        outputs.append(output)
    torch.testing.assert_close(torch.cat(outputs), plain(layer, inputs))
    torch.testing.assert_close(state[0], F.pad(inputs.t(), (kernel - 1, 0))[:, -(kernel - 1) :])


@pytest.mark.parametrize("counts", [(1, 1, 1), (4, 1, 2), (1, 7)], ids=str)
def test_requests_of_a_step_do_not_mix(counts: tuple[int, ...]) -> None:
    layer = random_layer(4)
    inputs, states = torch.randn(sum(counts), CHANNELS), torch.randn(len(counts), CHANNELS, len(layer.taps) - 1)
    outputs, after = layer(inputs, states, starts_of(*counts))
    for index, (chunk, output) in enumerate(zip(inputs.split(counts), outputs.split(counts), strict=True)):
        alone, state = layer(chunk, states[index : index + 1], starts_of(len(chunk)))
        torch.testing.assert_close(output, alone)
        torch.testing.assert_close(after[index], state[0])


@pytest.mark.parametrize("counts", [(1, 1), (3, 2)], ids=str)
def test_bfloat16_inputs_are_summed_in_float32(counts: tuple[int, ...]) -> None:
    layer = random_layer(4, has_silu=False)
    inputs = torch.randn(sum(counts), CHANNELS).bfloat16()
    states = torch.randn(len(counts), CHANNELS, len(layer.taps) - 1)
    outputs, after = layer(inputs, states, starts_of(*counts))
    exact, _ = layer(inputs.float(), states, starts_of(*counts))
    assert outputs.dtype == torch.bfloat16
    assert torch.equal(outputs, exact.bfloat16())
    assert after.dtype == torch.float32
