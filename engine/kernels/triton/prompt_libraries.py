"""The libraries that can attend to prompts, by name, as far as they are installed."""

from collections.abc import Callable
from importlib.util import find_spec

import torch

from weft.engine.kernels.triton.flash import FlashAttention2
from weft.engine.kernels.triton.flash3 import FlashAttention3
from weft.engine.kernels.triton.flashinfer import FlashInfer
from weft.engine.kernels.triton.prompt_attention import PromptAttention


def installed_libraries(device: torch.device) -> dict[str, Callable[[], PromptAttention]]:
    """Constructors, which import a library; any exception there means that it cannot be used."""
    libraries: dict[str, Callable[[], PromptAttention]] = {FlashAttention2.name: FlashAttention2}
    if find_spec("flash_attn_interface"):
        libraries[FlashAttention3.name] = lambda: FlashAttention3(device)
    # Without the package of compiled kernels, FlashInfer compiles them when they are first used.
    if find_spec("flashinfer") and find_spec("flashinfer_jit_cache"):
        libraries[FlashInfer.name] = lambda: FlashInfer(device)
    return libraries
