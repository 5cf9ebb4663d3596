"""RMSNorm (Zhang and Sennrich, 2019) and LayerNorm (Ba et al., 2016), with statistics in float32 for every dtype."""

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

    def __init__(self, weight: torch.Tensor | None, eps: float) -> None:
        """Take a weight (size,), or any that broadcasts to hidden; None leaves the factor out."""
        self.weight = weight
        self.eps = eps

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Same shape and dtype as hidden."""
        normed = normalise(hidden, self.eps)
        return normed if self.weight is None else normed.mul_(self.weight)


class LayerNorm:
    """Subtracts the mean of the last dimension of hidden (..., size), divides by the deviation, scales and shifts."""

    def __init__(self, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> None:
        """Take weight and bias (size,), or any that broadcast to hidden; None leaves one out."""
        self.weight, self.bias = weight, bias
        self.eps = eps

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Same shape and dtype as hidden."""
        size = hidden.shape[-1:]
        if self.weight is None or self.weight.shape == size:
            fits = self.weight is None or self.weight.dtype == hidden.dtype
            if fits and (self.bias is None or self.bias.dtype == hidden.dtype):
                return F.layer_norm(hidden, size, self.weight, self.bias, self.eps)
        normed = F.layer_norm(hidden.float(), size, None, None, self.eps)
        if self.weight is not None:
            normed = normed.mul_(self.weight)
        return (normed if self.bias is None else normed.add_(self.bias)).to(hidden.dtype)


class HeadNorm:
    """RMSNorm over each head of queries and keys in one call (QK-norm); each of the two has its own weight."""

    def __init__(
        self, query_weight: torch.Tensor, key_weight: torch.Tensor, num_heads: int, num_kv_heads: int, eps: float
    ) -> None:
        """Repeat the two weights (head_dim,) head by head: (num_heads + num_kv_heads, head_dim), queries first."""
        self.weight = torch.cat((query_weight.expand(num_heads, -1), key_weight.expand(num_kv_heads, -1)))
        self.eps = eps

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Same shape and dtype as hidden (num_tokens, num_heads + num_kv_heads, head_dim)."""
        return normalise(hidden, self.eps).mul_(self.weight)
