"""Resolves the engine's settings: every "auto" is decided by the options, the checkpoint and the machine.

Frozen: measured values (weights in memory, number of blocks) live in `MemoryPlan`.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from weft.engine.describe.config import ModelFacts
from weft.engine.vision.checkpoint import served_vision
from weft.engine.wire.errors import ModelError
from weft.engine.wire.machine import format_size
from weft.engine.wire.messages import EngineOptions

_CGROUP = Path("/sys/fs/cgroup")
_FP8_CAPABILITY = 8, 9
"""GPUs of this compute capability or a higher one convert e4m3 in hardware."""

_TORCH_ATTENTION = {"decode_attention": "torch", "prefill_attention": "torch"}
"""On CUDA, where Weft's own kernel is causal."""

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What the engine runs with: the options, and what was decided where they leave a choice.

    Attributes:
        options: The options as given. They are read directly where nothing is left to decide.
        dtype: Dtype of weights and activations.
        max_model_len: Most tokens of a request. The memory plan may lower it.
        max_num_seqs: Most requests that run at once.
        itl_target_s: Longest predicted step while anything decodes, or with overlap; None follows the decodes
            (`LatencyTarget`).
        overlap: Whether a step is launched before the one before it is collected.
        is_ngram: Whether repeated text is drafted from the request's own tokens.
        draft_model: Folder of the draft model or head, or of the model itself if its own head drafts; None for none.
        rounded_kv: Dtype of K and V in the cache if that is not dtype: float8_e4m3fn, or int8 with a scale for each
            token's K and V of a head.
        kernels: What computes a component, by its name. At first only what the options name; see
            `engine/tune/components.py`.
        rank: Which of the ranks that compute the model this process is; 0 is the engine.
        num_host_layers: The experts of so many layers, the first that have any, stay in host memory, where the CPU
            computes them; see `engine/kernels/host_experts.py`.
    """

    options: EngineOptions
    model: Path
    device: torch.device
    dtype: torch.dtype
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    itl_target_s: float | None
    overlap: bool
    is_ngram: bool = False
    draft_model: Path | None = None
    rounded_kv: torch.dtype | None = None
    kernels: Mapping[str, str] = field(default_factory=dict)
    rank: int = 0
    num_host_layers: int = 0

    @property
    def kv_cache_dtype(self) -> torch.dtype:
        """Dtype of K and V in the cache."""
        return self.rounded_kv or self.dtype


def resolve(options: EngineOptions, model: ModelFacts, num_host_layers: int | None = None) -> EngineConfig:
    """Decide what the options leave open.

    Args:
        num_host_layers: Layers with experts in host memory; None for as many as the options say, or else none.

    Raises:
        ModelError: The options ask for what the machine or the checkpoint does not have.
    """
    device = _device(options.device)
    is_cuda = device.type == "cuda"
    num_host_layers = num_host_layers or options.host_expert_layers or 0
    is_ahead = is_cuda and not num_host_layers  # else a launch already computes the step, or waits for most of it
    max_num_seqs = options.max_num_seqs or (256 if is_cuda else 128)
    block_size = options.block_size or (16 if is_cuda else 32)  # the CPU's attention reads 32 tokens at a time
    longest_picture = model.num_mutual if served_vision(model.vision, options) else 0
    least = max_num_seqs + max(block_size, longest_picture)
    longest = model.max_position_embeddings + -(-model.num_input_tokens // block_size) * block_size
    longest_whole = options.max_model_len or longest if model.is_bidirectional or model.num_input_tokens else 0
    usual = max(8192 if is_ahead else 2048, least, longest_whole)
    max_num_batched_tokens = options.max_num_batched_tokens or usual
    if max_num_batched_tokens < least:
        kept = "block_size" if block_size >= longest_picture else f"the {longest_picture} tokens of a picture"
        raise ModelError(
            f"max_num_batched_tokens must be at least max_num_seqs + {kept} = {least}, got {max_num_batched_tokens}"
        )
    max_model_len = options.max_model_len or longest
    if max_model_len > longest:
        raise ModelError(f"max_model_len must be at most {longest}, which the model was made for, got {max_model_len}")
    if model.is_bidirectional or model.num_input_tokens:
        max_model_len = min(max_model_len, max_num_batched_tokens)
    needs_torch = is_cuda and (model.is_bidirectional or model.num_input_tokens > 0)
    _check_ranks(options, device)
    _check_offload(options, device)
    if options.host_expert_layers and (fault := host_experts_fault(options, device)):
        raise ModelError(f"host_expert_layers {options.host_expert_layers} {fault}")
    dtype = _DTYPES.get(options.dtype, model.dtype)
    _check_quantization(options, device, dtype)
    return EngineConfig(
        options=options,
        model=Path(options.model),
        device=device,
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
        itl_target_s=options.itl_target_ms / 1e3 if options.itl_target_ms else 0.05 if is_ahead else None,
        overlap=is_ahead,
        is_ngram=options.speculative == "ngram",
        draft_model=_draft_folder(options),
        rounded_kv=_rounded_kv(options, device, dtype),
        kernels=options.kernels | _TORCH_ATTENTION if needs_torch else options.kernels,
        num_host_layers=num_host_layers,
    )


def host_experts_fault(options: EngineOptions, device: torch.device) -> str | None:
    """Why experts cannot be kept in host memory beside the device; None if they can."""
    if device.type == "cpu":
        return "needs device cuda, got cpu, where all experts are in host memory"
    for name, is_asked in (
        (settings_of_ranks(options), options.num_ranks > 1),
        (f"max_loras {options.max_loras}", options.max_loras > 0),
        ("quantization fp8, which the CPU's kernels do not have", options.quantization == "fp8"),
    ):
        if is_asked:
            return f"does not go together with {name}"
    return None


def _draft_folder(options: EngineOptions) -> Path | None:
    match options.speculative:
        case None | "ngram":
            return None
        case "mtp":
            return Path(options.model)
        case folder:
            return Path(folder)


def _check_quantization(options: EngineOptions, device: torch.device, dtype: torch.dtype) -> None:
    """Refuse a form of matrices that the device, or a dtype on it, has no kernels for."""
    name = options.quantization
    if name == "fp8" and device.type == "cpu":
        raise ModelError("quantization fp8 needs device cuda, got cpu, which has int8 and int4")
    dtypes = (torch.bfloat16, torch.float16) if device.type == "cuda" else (torch.bfloat16,)
    if name != "none" and dtype not in dtypes:
        needed, got = " or ".join(_name(each) for each in dtypes), _name(dtype)
        raise ModelError(f"quantization {name} needs dtype {needed} on device {device.type}, got {got}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_ranks(options: EngineOptions, device: torch.device) -> None:
    """Refuse what several ranks cannot do yet."""
    offload = "kv_offload" if options.kv_offload else "kv_offload_dir"
    for name, value, other, is_asked in (
        ("tensor_parallel_size", options.tensor_parallel_size, "deterministic", options.deterministic),  # for its sums
        ("pipeline_parallel_size", options.pipeline_parallel_size, offload, getattr(options, offload)),
    ):
        if value > 1 and is_asked:
            raise ModelError(f"{name} {value} does not go together with {other}")
    if options.num_ranks > 1 and device.type == "cuda":
        check_gpus(options)


def _check_offload(options: EngineOptions, device: torch.device) -> None:
    """Refuse evicted blocks that have no folder to be shared in, or no room in the host's memory."""
    if options.kv_role != "none" and not options.kv_offload_dir:
        raise ModelError(f"kv_role {options.kv_role} needs kv_offload_dir, the folder that engines share")
    if options.kv_offload and device.type == "cpu":
        raise ModelError(
            "kv_offload keeps blocks in the host's memory, where the KV cache of a CPU is anyway: raise "
            "kv_cache_memory, or keep them on disk with kv_offload_dir"
        )
    if options.kv_offload > (most := available_memory_bytes(torch.device("cpu"))):
        given = format_size(options.kv_offload)
        raise ModelError(f"kv_offload must be at most {format_size(most)}, the free memory of the host, got {given}")


def check_gpus(options: EngineOptions) -> None:
    """Refuse fewer GPUs than this machine has ranks."""
    size, here = len(options.ranks_here), f" on each of {options.nnodes} machines" * (options.nnodes > 1)
    if torch.cuda.device_count() < size:
        message = f"{settings_of_ranks(options)} needs {size} GPUs{here}, and there are {torch.cuda.device_count()}"
        raise ModelError(message)


def settings_of_ranks(options: EngineOptions) -> str:
    """The settings, with their values, that ask for several ranks."""
    sizes = {name: getattr(options, name) for name in ("tensor_parallel_size", "pipeline_parallel_size")}
    return " with ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)


def _rounded_kv(options: EngineOptions, device: torch.device, dtype: torch.dtype) -> torch.dtype | None:
    name = options.kv_cache_dtype
    if name == "auto":
        return None
    needed = "cuda" if name == "fp8" else "cpu"
    if device.type != needed:
        raise ModelError(f"kv_cache_dtype {name} needs device {needed}, got {device.type}")
    if name == "int8":
        if dtype != torch.bfloat16:
            raise ModelError(f"kv_cache_dtype int8 needs dtype bfloat16, got {_name(dtype)}")
        return torch.int8
    if not has_fp8(device):
        capability = torch.cuda.get_device_capability(device)
        needed, got = (f"{major}.{minor}" for major, minor in (_FP8_CAPABILITY, capability))
        raise ModelError(f"kv_cache_dtype fp8 needs compute capability {needed}, got {got}")
    return torch.float8_e4m3fn


def has_fp8(device: torch.device) -> bool:
    """Whether a GPU has instructions for e4m3."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FP8_CAPABILITY


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelError("device cuda was asked for, but torch finds no CUDA device")
    return torch.device(name)


def free_bytes(config: EngineConfig) -> int:
    """Bytes that a rank can allocate now. Each has a GPU of its own; on a CPU they share the memory."""
    sharing = len(config.options.ranks_here) if config.device.type == "cpu" else 1
    return available_memory_bytes(config.device) // sharing


def available_memory_bytes(device: torch.device) -> int:
    """Bytes that can be allocated now without taking memory in use."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = _meminfo_bytes("MemAvailable")
    limit = _CGROUP / "memory.max"  # a container's limit, where there is one
    if limit.exists() and limit.read_text().strip().isdigit():
        used = int((_CGROUP / "memory.current").read_text())
        pages = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        reclaimable = int(pages.get("inactive_file", 0))  # cached files, the weights just read among them
        free = min(free, int(limit.read_text()) - used + reclaimable)
    return free


def _meminfo_bytes(name: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
