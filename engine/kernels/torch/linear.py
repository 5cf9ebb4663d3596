"""torch's linear layers: plain, cuBLAS for CUDA, oneDNN for bfloat16 on a CPU, fixed tiles for CUDA.

Fixed tiles are for `--deterministic`: a row's result then does not depend on the number of rows. cuBLAS chooses its
kernel, and with it the order in which a row is summed, by the shape of the product. So every product has one shape:
tiles of ROW_TILE rows, the last one padded. Sums that are split over the inner dimension may differ from tile to tile,
so they are switched off.
"""

import torch
import torch.nn.functional as F
from typing_extensions import override

from weft.engine.layers.parts import Linear

# Rows of a tile. With fewer, reading the weights takes longer than the arithmetic that padding adds.
ROW_TILE = 128


class TorchLinear(Linear):
    """torch's own linear layer."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Take weight (out_features, in_features) and bias (out_features,), None if there is none."""
        self.weight = weight
        self.bias = bias

    @override
    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return F.linear(inputs, self.weight, self.bias)

    @override
    def add_to(self, residual: torch.Tensor, inputs: torch.Tensor) -> None:
        residual += self(inputs)

    @override
    def to_float32(self, inputs: torch.Tensor) -> torch.Tensor:
        return self(inputs).float()


class CublasLinear(TorchLinear):
    """Lets cuBLAS add the residual or write float32 itself, without a second pass and without rounding in between."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Keep the transposed view, which a call need not make then."""
        super().__init__(weight, bias)
        self._transposed = weight.t()

    @override
    def add_to(self, residual: torch.Tensor, inputs: torch.Tensor) -> None:
        residual.addmm_(inputs, self._transposed)
        if self.bias is not None:
            residual += self.bias

    @override
    def to_float32(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.bias is not None or inputs.dtype == torch.float32 or not inputs.is_cuda:  # torch widens on CUDA only
            return super().to_float32(inputs)
        return torch.mm(inputs, self._transposed, out_dtype=torch.float32)


class OnednnLinear(TorchLinear):
    """A weight in oneDNN's blocked layout: bfloat16 streams from memory almost twice as fast for a few rows.

    In float32 its products of many rows take four fifths of the time of torch's own library on AMD's processors.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Copy weight (out_features, in_features) into the blocked layout."""
        super().__init__(torch.ops.mkldnn._reorder_linear_weight(weight), bias)

    @override
    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return self._run(inputs, "none")

    def gelu(self, inputs: torch.Tensor) -> torch.Tensor:
        """The GELU of the outputs."""
        return self._run(inputs, "gelu")

    def _run(self, inputs: torch.Tensor, activation: str) -> torch.Tensor:
        outputs: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            inputs, self.weight, self.bias, activation, [], "none"
        )
        return outputs


class TiledLinear(TorchLinear):
    """torch's linear layer, tile by tile."""

    @override
    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        num_tokens = len(inputs)
        padded = F.pad(inputs, (0, 0, 0, -num_tokens % ROW_TILE))
        outputs = padded.new_empty(len(padded), len(self.weight))
        for tile, target in zip(torch.split(padded, ROW_TILE), torch.split(outputs, ROW_TILE), strict=True):
            torch.mm(tile, self.weight.t(), out=target)
        if self.bias is not None:
            outputs += self.bias
        return outputs[:num_tokens]


def forbid_split_sums() -> None:
    """Let cuBLAS sum every row in one piece. Only cuBLASLt takes this setting, and only for 16-bit types."""
    torch.backends.cuda.preferred_blas_library("cublaslt")
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = matmul.allow_fp16_reduced_precision_reduction = (False, False)
