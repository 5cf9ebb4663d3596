"""The engine as it starts on a device, for tests that run on a CPU in seconds and on a GPU in earnest."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.engine.cache.specs import group_layers
from weft.engine.core.engine import Engine
from weft.engine.models.config import load_model_config
from weft.engine.models.tensor_names import decoder_spec
from weft.engine.run.startup import start
from weft.engine.shared.messages import EngineOptions, TokenLogprobs

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

Entry = tuple[float, tuple[int, ...], tuple[float, ...]]


def start_engine(folder: Path, device: str, *, num_blocks: int = 400, dtype: str = "float32", **options: Any) -> Engine:
    """Start an engine with so many blocks of KV cache; steps are launched ahead on a CPU, too."""
    config = load_model_config(folder)
    block_size = options.setdefault("block_size", 16 if device == "cuda" else 32)
    groups = group_layers(decoder_spec(config).caches)
    block_bytes = sum(group.block_bytes(block_size, getattr(torch, dtype)) for group in groups)
    options = {
        "model": str(folder),
        "device": device,
        "dtype": dtype,
        "kv_cache_memory": num_blocks * block_bytes,
        "itl_target_ms": 60_000.0,  # how fast the machine is, decides nothing
        **options,
    }
    engine = start(EngineOptions(**options), "test").engine
    engine._overlap = True
    return engine


def graphs(engine: Engine) -> Any:
    """The owner of the engine's CUDA graphs; None where it uses none."""
    return getattr(engine._executor, "_graphs", None)


@contextlib.contextmanager
def without(engine: Engine, *features: str) -> Iterator[None]:
    """Do without "graphs" or "overlap" for a while."""
    runner: Any = engine._executor
    kept = engine._overlap, graphs(engine)
    if "overlap" in features:
        engine._overlap = False
    if "graphs" in features:
        runner._graphs = None
    yield
    engine._overlap, runner._graphs = kept


def bits(logprobs: list[TokenLogprobs] | None) -> list[Entry]:
    """Log-probabilities to be compared bit for bit."""
    return [(entry.logprob, tuple(entry.top_token_ids), tuple(entry.top_logprobs)) for entry in logprobs or []]
