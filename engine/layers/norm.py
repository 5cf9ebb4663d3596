"""RMSNorm: Zhang and Sennrich, 2019. Statistics in float32 whatever the dtype."""

import torch
import torch.nn.functional as F


def normalise(hidden: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide the last dimension of hidden (..., size) by its root mean square; a new tensor of the same dtype."""
    if hidden.is_cuda:
        return F.rms_norm(hidden, hidden.shape[-1:], None, eps)
    # torch has no fused kernel on the CPU; its composition takes three times as long as this one for long prompts.
    values = hidden.float()
    norms: torch.Tensor = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
    scales = norms.square_().div_(hidden.shape[-1]).add_(eps).rsqrt_()
    return torch.mul(values, scales).to(hidden.dtype)


class RMSNorm:
    """Normalises the last dimension, then scales by weight."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        """Scale by weight (size of the last dimension,)."""
        self.weight = weight
        self.eps = eps

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Same shape and dtype as hidden (..., size)."""
        return normalise(hidden, self.eps).mul_(self.weight)


class HeadNorm:
    """RMSNorm over each head of queries and keys at once (QK-norm), with weights of their own."""

    def __init__(
        self, query_weight: torch.Tensor, key_weight: torch.Tensor, num_heads: int, num_kv_heads: int, eps: float
    ) -> None:
        """Lay the two weights (head_dim,) out head by head."""
        self.weight = torch.cat((query_weight.expand(num_heads, -1), key_weight.expand(num_kv_heads, -1)))
        self.eps = eps

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        """Normalise heads (num_tokens, num_heads + num_kv_heads, head_dim), queries first."""
        return normalise(heads, self.eps).mul_(self.weight)
