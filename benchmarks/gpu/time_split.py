"""Where the time of a step goes: attention, matrices, norms and positions, sampling, copies, and the host.

The device's part comes from torch.profiler, by the names of kernels; what is left of the step, as it was timed without
a profiler, is the host's: time in which the device waits. Without CUDA the operations of torch stand in for kernels,
and Weft's own, which no profiler sees, are part of the host's.
"""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.job import UnavailableError

TORCH = "other operations of torch"
PARTS = (
    ("attention", r"attention|attn|attend|flash|fmha|paged|scaled_dot_product|^merge_kernel$"),
    ("matrices", r"gemm|gemv|cutlass|nvjet|xmma|wgmma|splitk|cublas|aten::(addmm|mm|linear|bmm)|matmul"),
    ("norms and positions", r"norm|rope|rotary|rotate|rms|silu|gelu|gated|swiglu|^(prepare_heads|activate)$"),
    (
        "sampling",
        r"sampl|argm|topk|softmax|sort|cumsum|scan|penal|mask|bias|multinomial|^(summarise|decide|collect|draw)$",
    ),
    ("copies", r"memcpy|memset|copy|gather|scatter|index|fill|cat"),
    (TORCH, r"elementwise|reduce|aten::"),
)
"""Part -> names of its kernels; the first that fits counts."""

OTHER = "other kernels"
HOST = "host"
NUM_KERNELS = 25
"""Kernels that are kept with their names, those that took longest."""


def part_of(kernel: str) -> str:
    """The part of a step that a kernel belongs to."""
    for part, pattern in PARTS:
        if re.search(pattern, kernel, re.IGNORECASE):
            return part
    return OTHER


def split(step: Callable[[], object], num_steps: int, step_s: float, device: str) -> dict[str, Any]:
    """Profile some steps.

    Args:
        step: Runs one; its results may be those of the step before.
        num_steps: How many to profile.
        step_s: What one takes without a profiler.
        device: cuda or cpu.

    Returns:
        In JSON's types: milliseconds a step of each part, and of the kernels that took longest.

    Raises:
        UnavailableError: There is nothing to split.
    """
    is_cuda = device == "cuda"
    if is_cuda:
        torch.cuda.synchronize()  # the step that was launched last is not one of them
    with profile(activities=[ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU]) as profiler:
        for _ in range(num_steps):
            step()
        if is_cuda:
            torch.cuda.synchronize()
    times_ms, counts = Counter[str](), Counter[str]()
    for event in profiler.events() or ():
        # Of what the host calls, the device's time is listed once more.
        if not is_cuda or (event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)):
            time_us = event.time_range.elapsed_us() if is_cuda else event.self_cpu_time_total
            times_ms[event.name] += time_us / 1e3 / num_steps
            counts[event.name] += 1
    if not times_ms:
        raise UnavailableError("the profiler saw no kernels")
    parts = dict.fromkeys((*(part for part, _ in PARTS), OTHER), 0.0)
    for name, time_ms in times_ms.items():
        parts[part_of(name)] += time_ms
    parts[HOST] = max(0.0, step_s * 1e3 - sum(parts.values()))
    return {
        "step_ms": step_s * 1e3,
        "parts_ms": parts,
        "kernels": [
            {"name": name[:160], "ms": time_ms, "per_step": counts[name] / num_steps}
            for name, time_ms in times_ms.most_common(NUM_KERNELS)
        ],
    }
