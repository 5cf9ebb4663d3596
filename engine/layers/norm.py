"""RMSNorm (Zhang and Sennrich, 2019), with statistics in float32 for every dtype."""

import torch
import torch.nn.functional as F


def normalise(hidden: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide the last dimension of hidden (..., size) by its root mean square; a new tensor of the same dtype."""
    if hidden.is_cuda:
        return F.rms_norm(hidden, hidden.shape[-1:], None, eps)
    # torch has no fused kernel on the CPU. For long prompts its own composition takes three times as long as this one.
    values = hidden.float()
    norms: torch.Tensor = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
    scales = norms.square_().div_(hidden.shape[-1]).add_(eps).rsqrt_()
    return torch.mul(values, scales).to(hidden.dtype)


class RMSNorm:
    """Normalises the last dimension of hidden (..., size), then multiplies by weight."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        """Take a weight (size,), or any that broadcasts to hidden."""
        self.weight = weight
        self.eps = eps

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Same shape and dtype as hidden."""
        return normalise(hidden, self.eps).mul_(self.weight)


class HeadNorm(RMSNorm):
    """RMSNorm over each head of queries and keys in one call (QK-norm); each of the two has its own weight."""

    def __init__(
        self, query_weight: torch.Tensor, key_weight: torch.Tensor, num_heads: int, num_kv_heads: int, eps: float
    ) -> None:
        """Repeat the two weights (head_dim,) head by head: (num_heads + num_kv_heads, head_dim), queries first."""
        super().__init__(torch.cat((query_weight.expand(num_heads, -1), key_weight.expand(num_kv_heads, -1))), eps)
