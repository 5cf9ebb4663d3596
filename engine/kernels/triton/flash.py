"""Attention to new prompts by torch's FlashAttention 2 (Dao, 2023).

A step qualifies if none of its prompts continues from an earlier step. Its tokens then see only K/V of the step itself,
which lie side by side. If one prompt continues, Weft's kernel computes all: most of what such a prompt sees is in the
paged cache, which torch's function does not read.
"""

import torch

from weft.engine.kernels.triton.prompt_attention import PromptLayers, Prompts, PromptStep


class FlashAttention2:
    """See `PromptAttention`."""

    name = "flash2"
    needs = (
        "plain attention in bfloat16 or float16, heads of at most 256 values, a multiple of 8, and scores without a "
        "soft cap or a scale of their own"
    )

    def supports(self, layers: PromptLayers) -> bool:
        """Soft caps and scales are left out: torch passes no cap."""
        spec = layers.spec
        is_plain = layers.is_plain and spec.soft_cap is None and spec.scale is None
        return is_plain and layers.capability >= (8, 0) and spec.head_dim <= 256 and spec.head_dim % 8 == 0

    def begin(self, prompts: Prompts, layers: PromptLayers) -> PromptStep | None:
        """Take fresh prompts, if none is longer than the sliding window."""
        window, longest = layers.spec.sliding_window, prompts.longest
        if not prompts.are_fresh or (window is not None and longest > window):
            return None

        def attend(
            queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, starts: torch.Tensor
        ) -> torch.Tensor:
            # `torch.nn.attention.varlen.varlen_attn` calls the same; its signature still changes.
            flash = torch.ops.aten._flash_attention_forward
            attended: torch.Tensor = flash(queries, keys, values, starts, starts, longest, longest, 0.0, True, False)[0]
            return attended

        return PromptStep(prompts.tokens, prompts.starts, attend)
