"""RMSNorm: Zhang and Sennrich, 2019. Statistics in float32 whatever the dtype."""

import torch
import torch.nn.functional as F


class RMSNorm:
    """Normalises the last dimension, then scales by weight."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        """Scale by weight (size of the last dimension,)."""
        self.weight = weight
        self.eps = eps

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Same shape and dtype as hidden (..., size)."""
        return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)


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
        return F.rms_norm(heads, self.weight.shape[-1:], None, self.eps).mul_(self.weight)
