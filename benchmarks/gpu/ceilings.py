"""What the machine can do at best: read its memory, multiply matrices, take data from the host. And what it is.

Measured on random data, since zeros run faster, and best of several rounds, since a ceiling is a best. Buffers are far
larger than any cache.
"""

import importlib.metadata
import math
import os
import platform
import time
from collections.abc import Callable

import torch

from benchmarks.gpu.job import Job, Reporter
from benchmarks.gpu.models import model_folder
from weft.engine.describe.config import load_model_config
from weft.engine.parts.decoder import decoder_spec

_NUM_ROUNDS = 8
_NUM_TOGETHER = 4
_LEAST_S = 0.3
"""Rounds go on for so long, since an idle GPU takes a while to reach its clock."""


def run(job: Job, reporter: Reporter) -> None:
    """Measure all ceilings; each is a note of its own, so that one that fails does not take the others with it."""
    torch.set_grad_enabled(False)
    device = torch.device(job.device)
    reporter.note("machine", describe(device))
    reporter.progress("device memory")
    reporter.note("memory_bytes_per_s", _memory(job.sizes.ceiling_bytes, device))
    reporter.progress("matrix products")
    config = load_model_config(model_folder(job.scratch, job.sizes.large))
    layers = [(m.out_features, m.in_features) for m in decoder_spec(config).matrices[:-1]]
    reporter.note(
        "matrix_flops_per_s", _matrices(layers[: len(layers) // config.num_layers], job.sizes.matrix_rows, device)
    )
    reporter.progress("host to device")
    if device.type == "cuda":
        reporter.note("host_to_device_bytes_per_s", _host_to_device(job.sizes.ceiling_bytes, device))


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """The shortest of some calls, by the device's clock where it has one; the first call is not counted.

    By that clock a few are timed together, so that the device does not wait for the host between two of them.
    """
    call()
    best, began = math.inf, time.perf_counter()
    least_s = _LEAST_S if device.type == "cuda" else 0.0
    num_rounds = 0
    while num_rounds < _NUM_ROUNDS or time.perf_counter() - began < least_s:
        num_rounds += 1
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(_NUM_TOGETHER):
                call()
            end.record()
            end.synchronize()
            best = min(best, begin.elapsed_time(end) / 1e3 / _NUM_TOGETHER)
        else:
            start = time.perf_counter()
            call()
            best = min(best, time.perf_counter() - start)
    return best


def _memory(num_bytes: int, device: torch.device) -> dict[str, float]:
    """A copy, which counts bytes read and written, and a sum, which reads alone; a decode is more like the sum."""
    source = torch.randn(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / seconds(lambda: target.copy_(source), device)
    read = source.nbytes / seconds(source.sum, device)
    return {"copy": copy, "sum": read, "best": max(copy, read)}


def _matrices(shapes: tuple[tuple[int, int], ...], num_rows: int, device: torch.device) -> dict[str, float]:
    """The matrices of one layer, one after another: operations per second of each, and of all together."""
    rates: dict[str, float] = {}
    flops = time_s = 0.0
    for out_features, in_features in shapes:
        inputs = torch.randn(num_rows, in_features, device=device).bfloat16()
        weight = torch.randn(out_features, in_features, device=device).bfloat16()
        product_s = seconds(lambda: torch.nn.functional.linear(inputs, weight), device)  # noqa: B023 (called at once)
        product_flops = 2.0 * num_rows * out_features * in_features
        rates[f"{num_rows} x {in_features} x {out_features}"] = product_flops / product_s
        flops, time_s = flops + product_flops, time_s + product_s
    return rates | {"best": flops / time_s}


def _host_to_device(num_bytes: int, device: torch.device) -> dict[str, float]:
    """From pinned memory, as the loader has it, and from ordinary memory."""
    target = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    pageable = torch.ones(num_bytes, dtype=torch.uint8)
    pinned = pageable.pin_memory()
    best = num_bytes / seconds(lambda: target.copy_(pinned, non_blocking=True), device)
    return {"pageable": num_bytes / seconds(lambda: target.copy_(pageable), device), "best": best}


def describe(device: torch.device) -> dict[str, object]:
    """The machine and its software, in JSON's types."""
    facts: dict[str, object] = {
        "device": "cpu",
        "cpu_cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
    }
    for package in ("torch", "triton", "transformers"):
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[package] = None
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "device": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
        }
    return facts
