"""Linear layers whose rows do not depend on how many there are, for `--deterministic` on CUDA.

cuBLAS chooses its kernel by the shape of a product, and with it the order in which a row is summed up. So every product
here has one shape: tiles of ROW_TILE rows, the last one padded. Sums that are split over the inner dimension, which may
be done differently from tile to tile, are switched off.
"""

import torch
import torch.nn.functional as F

from weft.engine.kernels.torch.linear import TorchLinear

ROW_TILE = 128
"""Rows of a product: below this, reading the weights takes longer than the arithmetic that padding adds."""


class TiledLinear(TorchLinear):
    """torch's linear layer, one tile of rows after the other; see `weft.engine.kernels.torch.torch_kit.Linear`."""

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """(num_tokens, in_features) -> (num_tokens, out_features)."""
        num_tokens = len(inputs)
        padded = F.pad(inputs, (0, 0, 0, -num_tokens % ROW_TILE))
        outputs = padded.new_empty(len(padded), len(self.weight))
        for tile, target in zip(torch.split(padded, ROW_TILE), torch.split(outputs, ROW_TILE), strict=True):
            torch.mm(tile, self.weight.t(), out=target)
        if self.bias is not None:
            outputs += self.bias
        return outputs[:num_tokens]


def forbid_split_sums() -> None:
    """Let cuBLAS sum every row of a product in one piece; only cuBLASLt can be told so, and only of 16-bit types."""
    torch.backends.cuda.preferred_blas_library("cublaslt")
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = matmul.allow_fp16_reduced_precision_reduction = (False, False)
