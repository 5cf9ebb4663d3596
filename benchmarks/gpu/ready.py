"""From the command to the first token, with a real checkpoint in the page cache, where writing leaves it.

Twice: with empty folders of compiled kernels and of what was chosen at start-up, then with what the first start left.
"""

import dataclasses
import pathlib
import shutil
import tempfile
import time

import torch

from benchmarks.compare import servers
from benchmarks.compare.load import load
from benchmarks.compare.workloads import Workload, bodies
from benchmarks.gpu.clients import REQUEST_TIMEOUT_S
from benchmarks.gpu.job import Job, Reporter, UnavailableError
from benchmarks.gpu.models import model_folder, read_work, write_weights
from benchmarks.gpu.over_http import START_TIMEOUT_S, server
from weft.engine.parts.decoder import decoder_spec

_SHARED_MEMORY = pathlib.Path("/dev/shm")
"""Files here are nothing but page cache; where it is too small, the scratch folder is taken."""

_CACHE_FOLDERS = ("TRITON_CACHE_DIR", "XDG_CACHE_HOME")

_ROOM = 1.1
"""Free space that is asked for, as a multiple of the weights."""


def run(job: Job, reporter: Reporter) -> None:
    """Write the checkpoint, start servers on it, and ask each for a token.

    Raises:
        UnavailableError: There is no room for it.
    """
    source = model_folder(job.scratch, job.sizes.large)
    config = read_work(source).config
    num_bytes = decoder_spec(config).num_parameters * config.dtype.itemsize
    with tempfile.TemporaryDirectory(prefix="weft-gpu-", dir=_place(job, num_bytes)) as parent:
        folder = pathlib.Path(parent) / job.sizes.large
        reporter.progress("writing a checkpoint")
        write_weights(source, folder, job.device)
        if job.device == "cuda":
            torch.cuda.empty_cache()  # the server is to find the whole device free
        caches = {variable: str(pathlib.Path(parent) / variable) for variable in _CACHE_FOLDERS}
        plain = server(job, job.sizes.large)
        wanted = dataclasses.replace(plain, models={"main": folder}, environment={**plain.environment, **caches})
        for row in ("ready", "ready-again"):
            reporter.progress(f"{row}: starting a server")
            _start(row, wanted, config.vocab_size, num_bytes, job, reporter)


def _start(row: str, wanted: servers.Server, vocab_size: int, num_bytes: int, job: Job, reporter: Reporter) -> None:
    """Start a server and wait for a first token."""
    workload = Workload("ready", "first token", "main", 1, 1, min(16, job.sizes.input_tokens), 2)
    begin = time.perf_counter()
    with servers.running(wanted, [workload], job.scratch / f"{row}.server.log", START_TIMEOUT_S) as running:
        requests = bodies(workload, servers.model_name(running.url), vocab_size, 0, 0).measured
        (stream,) = load(running.url, requests, 1, REQUEST_TIMEOUT_S)
        reporter.measured(
            row,
            stream.times[0] - begin,
            {"host_to_device_bytes_per_s": num_bytes},
            ready_s=running.startup_s,
            ttft_ms=(stream.times[0] - stream.sent_at) * 1e3,
        )


def _place(job: Job, num_bytes: int) -> pathlib.Path:
    free = {place: shutil.disk_usage(place).free for place in (_SHARED_MEMORY, job.scratch) if place.exists()}
    for place, num_free in free.items():
        if num_free > _ROOM * num_bytes:
            return place
    found = ", ".join(f"{place} has {num_free / 1e9:.1f} GB free" for place, num_free in free.items())
    raise UnavailableError(f"the weights take {num_bytes / 1e9:.1f} GB, and {found} (--scratch)")
