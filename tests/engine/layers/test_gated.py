import pytest
import torch
from transformers.activations import ACT2FN

from weft.engine.kernels.torch.layer_kernels import TorchLinear
from weft.engine.layers.feed_forward import ACTIVATIONS, gated


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_layer_equals_its_definition(activation: str) -> None:
    torch.manual_seed(0)
    gate, up = torch.randn(24, 8), torch.randn(24, 8)
    hidden = torch.randn(5, 8)
    expected = ACT2FN[activation](hidden @ gate.T) * (hidden @ up.T)
    layer = gated(TorchLinear(torch.cat((gate, up))), activation)
    torch.testing.assert_close(layer(hidden), expected, atol=1e-4, rtol=1e-4)
