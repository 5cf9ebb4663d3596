"""Linear layers of torch: the plain one, for any device, cuBLAS's for CUDA, and oneDNN's for bfloat16 on a CPU."""

import torch
import torch.nn.functional as F


class TorchLinear:
    """torch's own linear layer; see `weft.engine.kernels.torch.torch_kit.Linear`."""

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


class CublasLinear(TorchLinear):
    """cuBLAS adds the residual, or leaves float32, as it writes the outputs: no second pass and no rounding between."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """See `TorchLinear`."""
        super().__init__(weight, bias)
        self._transposed = weight.t()

    def add_to(self, residual: torch.Tensor, inputs: torch.Tensor) -> None:
        """See `TorchLinear`."""
        residual.addmm_(inputs, self._transposed)
        if self.bias is not None:
            residual += self.bias

    def to_float32(self, inputs: torch.Tensor) -> torch.Tensor:
        """See `TorchLinear`."""
        if self.bias is not None or inputs.dtype == torch.float32 or not inputs.is_cuda:  # torch widens on CUDA only
            return super().to_float32(inputs)
        return torch.mm(inputs, self._transposed, out_dtype=torch.float32)


class OnednnLinear(TorchLinear):
    """A bfloat16 weight in oneDNN's blocked layout, which streams from memory almost twice as fast for a few rows."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Copy weight (out_features, in_features) into the blocked layout."""
        super().__init__(torch.ops.mkldnn._reorder_linear_weight(weight), bias)

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """(num_tokens, in_features) -> (num_tokens, out_features)."""
        outputs: torch.Tensor = torch.ops.mkldnn._linear_pointwise(inputs, self.weight, self.bias, "none", [], "")
        return outputs
