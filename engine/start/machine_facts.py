"""Prints as JSON what torch and the native kernels know of this machine, for `weft doctor`; loads no model."""

import sys

import msgspec
import torch

from weft.engine.config import available_memory_bytes
from weft.engine.kernels.cpu import library
from weft.engine.tune import compare as settled_file
from weft.engine.wire.machine import CudaDevice, MachineFacts


def collect() -> MachineFacts:
    """Ask torch, the kernels and the operating system."""
    native = library.load()
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    return MachineFacts(
        cuda_version=torch.version.cuda,
        cuda_devices=tuple(map(_device, range(torch.cuda.device_count()))),
        free_bytes=available_memory_bytes(torch.device("cpu")),
        compiled=library.compiled_variants(),
        native=native.variant if native else None,
        settled=tuple(s for name in devices for s in settled_file.open_choices(torch.device(name)).of_this_machine()),
    )


def _device(index: int) -> CudaDevice:
    major, minor = torch.cuda.get_device_capability(index)
    return CudaDevice(torch.cuda.get_device_name(index), f"{major}.{minor}", torch.cuda.mem_get_info(index)[0])


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(collect()))
