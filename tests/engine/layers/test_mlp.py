import pytest
import torch
from transformers.activations import ACT2FN

from engine.layers.linear import Linear
from engine.layers.mlp import ACTIVATIONS, GatedMLP


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_mlp_equals_its_definition(activation: str) -> None:
    torch.manual_seed(0)
    gate, up, down = torch.randn(24, 8), torch.randn(24, 8), torch.randn(8, 24)
    hidden = torch.randn(5, 8)
    expected = (ACT2FN[activation](hidden @ gate.T) * (hidden @ up.T)) @ down.T
    mlp = GatedMLP(Linear(torch.cat((gate, up))), Linear(down), activation)
    torch.testing.assert_close(mlp(hidden), expected, atol=1e-4, rtol=1e-4)
