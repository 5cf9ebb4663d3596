"""Weft's paged attention as an implementation of transformers' AttentionInterface.

A step's tokens reach the module as one row, and its masks are none: the caches of the step know which token belongs to
which request. Every attention module carries a `LayerCache`, since the interface hands over nothing but the module.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional
from transformers import AttentionInterface

from weft.engine.layers.attention import AttentionStep

PAGED = "weft"
"""Name of this attention, for `attn_implementation`. No mask is registered for it, so transformers makes none."""


class CurrentStep:
    """The attention of the step that a model computes now; shared by its layers, changed by the model alone."""

    attention: AttentionStep | None = None


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Which cache of the step a module uses, and the dtype of the model."""

    current: CurrentStep
    layer: int
    dtype: torch.dtype

    def attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """Attend in the current step.

        Args:
            queries: (1, num_heads, num_tokens, head_dim).
            keys: (1, num_kv_heads, num_tokens, head_dim).
            values: (1, num_kv_heads, num_tokens, value_dim); smaller ones are kept with zeros at the end.
            sinks: (num_heads,), see `AttentionStep.attend`; None without sinks.

        Returns:
            (1, num_tokens, num_heads, value_dim) in the dtype of queries.
        """
        assert self.current.attention is not None, "a module attends outside of a step"
        value_dim = values.shape[-1]
        padded = functional.pad(values, (0, keys.shape[-1] - value_dim)) if value_dim < keys.shape[-1] else values
        flat = (heads[0].transpose(0, 1).to(self.dtype).contiguous() for heads in (queries, keys, padded))
        sunk = None if sinks is None else sinks.float()
        attended = self.current.attention.attend(
            self.layer, next(flat), next(flat), next(flat), sunk
        )  # (num_tokens, num_heads, head_dim)
        return attended[..., :value_dim].unsqueeze(0).to(queries.dtype)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    cache = module.weft_cache
    assert isinstance(cache, LayerCache)
    return cache.attend(query, key, value, s_aux), None


AttentionInterface.register(PAGED, _attend)
