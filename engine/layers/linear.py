"""Linear layers of torch: the plain one, for any device, and oneDNN's for bfloat16 on a CPU."""

import torch
import torch.nn.functional as F


class TorchLinear:
    """torch's own linear layer; see `engine.layers.kit.Linear`."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Take weight (out_features, in_features) and bias (out_features,), None if there is none."""
        self.weight = weight
        self.bias = bias

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """(num_tokens, in_features) -> (num_tokens, out_features)."""
        return F.linear(inputs, self.weight, self.bias)

    def add_to(self, residual: torch.Tensor, inputs: torch.Tensor) -> None:
        """Add the outputs to residual (num_tokens, out_features)."""
        residual += self(inputs)

    def to_float32(self, inputs: torch.Tensor) -> torch.Tensor:
        """self(inputs) in float32."""
        return self(inputs).float()


class OnednnLinear(TorchLinear):
    """A bfloat16 weight in oneDNN's blocked layout, which streams from memory almost twice as fast for a few rows."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Copy weight (out_features, in_features) into the blocked layout."""
        super().__init__(torch.ops.mkldnn._reorder_linear_weight(weight), bias)

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """(num_tokens, in_features) -> (num_tokens, out_features)."""
        outputs: torch.Tensor = torch.ops.mkldnn._linear_pointwise(inputs, self.weight, self.bias, "none", [], "")
        return outputs
