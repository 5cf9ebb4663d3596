"""Loads a checkpoint into transformers' module: transformers names, merges and ties tensors, Weft's reader reads them.

Transformers gets every tensor as a promise to read it. Beside the weights, one tensor exists at a time, or those that
are merged into one, such as the experts of a layer.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging as untyped_logging

from weft.engine.fallback.attention import PAGED
from weft.engine.fallback.config import FallbackConfig
from weft.engine.fallback.model import TransformersModel
from weft.engine.fallback.packing import pack
from weft.engine.fallback.request_model import RequestModel
from weft.engine.layers.kit import LayerKit
from weft.engine.models.loading import LoadFormat
from weft.engine.shared.errors import ModelError
from weft.engine.weights.formats import Progress
from weft.engine.weights.tensor_files import CheckpointSource, RandomSource, refuse_unexpected

transformers_logging: Any = untyped_logging

_EXPERT = re.compile(r"(.*\.experts\.)(\d+)(\..*)")
"""The name of a tensor that one expert has: its layer, its number, what it is."""


@dataclass(frozen=True, slots=True)
class _Promise:
    """A tensor that is read when transformers asks for all of it, as of a slice of safetensors."""

    read: Callable[[str], torch.Tensor]
    name: str

    def __getitem__(self, everything: object) -> torch.Tensor:
        return self.read(self.name)


def load_fallback(
    folder: Path,
    config: FallbackConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    kit: LayerKit | None = None,
    load_format: LoadFormat = "auto",
    progress: Progress = lambda done, total: None,
) -> TransformersModel | RequestModel:
    """Build the module with the weights in folder.

    Args:
        folder: Model folder in Hugging Face layout; its weights are not read if load_format is "dummy".
        kit: Makes the linear layers; None leaves them as they are.
        load_format: "dummy" makes random weights.
        progress: Called after every tensor.

    Raises:
        ModelError: The checkpoint does not hold exactly the tensors that the module needs.
    """
    total, done = config.num_values * dtype.itemsize, 0

    names, read = _random(config, dtype) if load_format == "dummy" else _stored(folder, config.is_half)

    _check_experts(names)
    shapes: dict[str, torch.Size] = {}

    def counted(name: str) -> torch.Tensor:
        nonlocal done
        tensor = read(name)
        shape = shapes.setdefault(_EXPERT.sub(r"\1*\3", name), tensor.shape)  # experts that are stacked are alike
        if shape != tensor.shape:
            raise ModelError(f"tensor {name} has shape {list(tensor.shape)}, others of its kind {list(shape)}")
        done = min(done + tensor.numel() * dtype.itemsize, total)  # a tied matrix may be stored twice
        progress(done, total)
        return tensor

    module = _load(config, {name: _Promise(counted, name) for name in names}, dtype)
    torch.nn.Module.to(module, device)
    progress(total, total)
    if config.calls is None:
        return RequestModel(module)
    model = TransformersModel(module, config.calls, dtype)
    if kit is not None:
        pack(module, kit, dtype)
    return model


def _check_experts(names: Iterable[str]) -> None:
    """Name the tensor of an expert that is missing; transformers only says that it cannot stack them."""
    stored, sizes = set(names), dict[tuple[str, str], int]()
    for match in filter(None, map(_EXPERT.fullmatch, stored)):
        experts, number, kind = match.groups()
        sizes[experts, kind] = max(sizes.get((experts, kind), 0), int(number) + 1)
    for (experts, kind), size in sorted(sizes.items()):
        for number in range(size):
            if f"{experts}{number}{kind}" not in stored:
                raise ModelError(f"tensor {experts}{number}{kind} is missing from the checkpoint")


def _stored(folder: Path, is_half: bool) -> tuple[Iterable[str], Callable[[str], torch.Tensor]]:
    source = CheckpointSource(folder, torch.device("cpu"), is_half=is_half)
    return source.names, source.read


def _random(config: FallbackConfig, dtype: torch.dtype) -> tuple[Iterable[str], Callable[[str], torch.Tensor]]:
    source = RandomSource(0, dtype, torch.device("cpu"), norm_weight=1.0)
    with torch.device("meta"):
        module = config.model_class(config.config)
    stored = module.state_dict()
    buffers = {name: buffer for name, buffer in module.named_buffers() if name in stored}
    tensors = dict(module.named_parameters()) | buffers

    def make(name: str) -> torch.Tensor:
        if not tensors[name].is_floating_point():
            return torch.zeros(tensors[name].shape, dtype=tensors[name].dtype)
        tensor = torch.empty(tensors[name].shape, dtype=dtype)
        source.fill(name, tensor)
        return tensor

    return tensors, make


def _load(config: FallbackConfig, promises: Mapping[str, _Promise], dtype: torch.dtype) -> PreTrainedModel:
    model_class: Any = config.model_class  # typed as if it returned no report
    try:
        with _quiet_and_one_by_one():
            module, report = model_class.from_pretrained(
                None,
                config=config.config,
                state_dict=promises,
                dtype=dtype,
                attn_implementation="eager" if config.calls is None else PAGED,
                ignore_mismatched_sizes=True,  # they are reported, and refused below
                output_loading_info=True,
            )
    except (RuntimeError, ValueError) as error:
        raise ModelError(f"the checkpoint does not fit the model: {' '.join(str(error).split())[:300]}") from None
    except (
        AttributeError,
        ImportError,
        LookupError,
        TypeError,
    ) as error:  # as where it wants another part of config.json
        fault = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ModelError(
            f"architecture {config.architecture} is not supported: it cannot be loaded ({fault})"
        ) from None
    for name, stored, expected in sorted(report["mismatched_keys"]):
        raise ModelError(f"tensor {name} has shape {list(stored)}, config.json asks for {list(expected)}")
    for name in sorted(report["missing_keys"]):
        raise ModelError(f"tensor {name} is missing from the checkpoint")
    refuse_unexpected(report["unexpected_keys"])
    loaded: PreTrainedModel = module.eval()
    return loaded


@contextmanager
def _quiet_and_one_by_one() -> Iterator[None]:
    """Transformers' threads would read all tensors ahead of the merging, a second copy; its bars are for terminals."""
    name, level = "HF_DEACTIVATE_ASYNC_LOAD", transformers_logging.get_verbosity()
    before = os.environ.get(name)
    os.environ[name] = "1"
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
