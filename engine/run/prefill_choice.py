"""Decides by measurement what attends to new prompts on CUDA: Weft's Triton kernel or FlashAttention 2."""

import logging
from collections.abc import Callable
from dataclasses import replace

import torch

from weft.engine.cache.specs import CacheGroup, CacheSpec, PagedKV, paged_groups
from weft.engine.kernels.triton.flash import FlashAttention2
from weft.engine.run.config import EngineConfig
from weft.engine.run.dummy_batch import dummy_batch
from weft.engine.run.kernel_choice import has_triton, make_backend, supports_prompts
from weft.engine.shared.errors import ModelError

logger = logging.getLogger(__name__)

# Tokens of a measured prompt. The step has as many prompts as it may, so that it computes longer than it takes to
# launch.
_MEASURED_TOKENS = 2048
_NUM_RUNS = 5


def settle_prefill(groups: tuple[CacheGroup[CacheSpec], ...], config: EngineConfig, num_heads: int) -> EngineConfig:
    """Replace "auto" in `prefill_attention` by "flash" or "triton" on CUDA.

    Raises:
        ModelError: The choice that was asked for cannot serve the model.
    """
    asked = config.prefill_attention
    if config.device.type != "cuda":
        return config
    if not has_triton(config.device):
        if asked != "auto":
            raise ModelError(f"prefill_attention {asked} needs Triton and a C compiler, which it runs at start-up")
        return config
    paged = paged_groups(groups)
    flash = FlashAttention2()
    can = bool(paged) and supports_prompts(flash, paged, config, num_heads)
    if asked == "flash" and not can:
        raise ModelError(f"prefill_attention flash needs {flash.needs}, and not deterministic")
    if asked != "auto" or not paged:
        return config
    spec = min((group.spec for group in paged), key=lambda spec: spec.sliding_window or 0)  # full attention, if any
    return replace(config, prefill_attention="flash" if can and _is_flash_faster(spec, num_heads, config) else "triton")


def _is_flash_faster(spec: PagedKV, num_heads: int, config: EngineConfig) -> bool:
    """Measure one layer's attention to new prompts, by Weft's kernel and by FlashAttention 2."""
    longest = min(_MEASURED_TOKENS, config.max_model_len, spec.sliding_window or _MEASURED_TOKENS)
    num_tokens = min(config.max_num_batched_tokens, config.max_num_seqs * longest)
    batch = dummy_batch(num_tokens, (spec,), config.block_size, 1, longest)
    num_blocks = int(batch.groups[0].block_tables.max()) + 1
    sizes = num_heads, spec.num_kv_heads, spec.num_kv_heads
    qkv = torch.randn(num_tokens, sum(sizes), spec.head_dim, device=config.device).to(config.dtype)
    parts = qkv.split_with_sizes(sizes, dim=1)

    def shortest(choice: str) -> float:
        chosen = replace(config, prefill_attention=choice)
        step = make_backend((CacheGroup(spec, (0,)),), num_blocks, chosen, num_heads).begin(batch)
        return min(_measure(lambda: step.attend(0, *parts)) for _ in range(_NUM_RUNS))

    own = shortest("triton")
    try:
        flash_ms = shortest("flash")
    except RuntimeError as error:  # torch was built without it, or for other GPUs
        logger.warning("FlashAttention 2 cannot be used: %s", error)
        return False
    named = "prompts of %d tokens, %d in all: a layer's attention takes Triton %.3f ms, FlashAttention 2 %.3f ms"
    logger.info(named, longest, num_tokens, own, flash_ms)
    return flash_ms < own


def _measure(call: Callable[[], object]) -> float:
    """Milliseconds on the device, after a first call that compiles kernels."""
    call()
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    began.record()
    call()
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended))
