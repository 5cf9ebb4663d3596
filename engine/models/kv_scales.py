"""Reads the scales of K and V that a checkpoint brings for an fp8 cache: of a layer, or of each head.

Names: llm-compressor and AutoFP8 put them beside the projections (`self_attn.k_scale`; one `kv_scale` for both), which
vLLM's own files call `attn.k_scale`; ModelOpt, older llm-compressor and Quark inside of them (`k_proj.k_scale`,
`k_proj.output_scale`). In all of them K is the scale times what is kept.
"""

import logging
from collections.abc import Iterable
from pathlib import Path

import torch

from weft.engine.cache.specs import PagedKV
from weft.engine.describe.specs import DecoderSpec
from weft.engine.models.cut import Cut
from weft.engine.shared.errors import ModelError
from weft.engine.weights.refs import WeightRef
from weft.engine.weights.tensor_files import CheckpointSource, misshapen

logger = logging.getLogger(__name__)

_PLACES = (
    *(".{}_scale", ".attn.{}_scale", ".{}_proj.{}_scale", ".qkv_proj.{}_scale", ".{}_proj.output_scale"),
    ".kv_scale",
)
"""Of the scale of k or of v, in the module of the projections."""


def read_kv_scales(folder: Path, whole: DecoderSpec, own: DecoderSpec, cut: Cut) -> dict[int, torch.Tensor]:
    """(2, num_kv_heads) float32, of K and of V, by the index of the cache; layers without scales are left out.

    Args:
        whole: The stage with all heads.
        own: The same with the heads of this rank.
        cut: Which these are.

    Raises:
        ModelError: A tensor has another shape, or a scale is not a positive number.
    """
    checkpoint, scales = CheckpointSource(folder, torch.device("cpu")), dict[int, torch.Tensor]()
    for block, first in zip(whole.blocks, whole.first_caches(), strict=True):
        modules = dict.fromkeys(
            name.rpartition(".")[0] for ref in block.weights if isinstance(ref, WeightRef) for name in ref.names
        )
        for index, (cache, of_rank) in enumerate(zip(block.caches, own.caches[first:], strict=False), first):
            if not isinstance(cache, PagedKV) or not isinstance(of_rank, PagedKV) or cache.latent_dim is not None:
                continue
            sides = [_read(checkpoint, modules, side, cache.num_kv_heads) for side in "kv"]
            if any(side is not None for side in sides):
                ones = torch.ones(cache.num_kv_heads)
                both = torch.stack([ones if side is None else side for side in sides])
                is_divided = of_rank.num_kv_heads < cache.num_kv_heads
                heads = cut.run(cache.num_kv_heads) if is_divided else (0, cache.num_kv_heads)
                scales[index] = both.narrow(1, *heads).contiguous()
    if scales and not cut.rank:
        logger.info("K and V of %d layers are rounded to fp8 by the checkpoint's scales", len(scales))
    return scales


def _read(checkpoint: CheckpointSource, modules: Iterable[str], side: str, num_heads: int) -> torch.Tensor | None:
    """(num_heads,) for a side, k or v; None if no module has a scale of it."""
    names = (module + place.format(side, side) for module in modules for place in _PLACES)
    name = next(filter(checkpoint.has, names), None)
    if name is None:
        return None
    stored = checkpoint.take(name)
    if stored.numel() not in (1, num_heads):
        raise misshapen(name, stored, (num_heads,))
    values = stored.float().flatten()
    if not (values.isfinite() & (values > 0)).all():
        raise ModelError(f"tensor {name} must hold positive numbers, scales of a KV cache, got {values.min():g}")
    return values.expand(num_heads)
