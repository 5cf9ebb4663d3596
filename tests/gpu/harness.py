"""The engine as it starts on a device, for tests that run on a CPU in seconds and on a GPU in earnest."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import WIDE_CHECKPOINTS
from weft.engine.cache.specs import group_layers
from weft.engine.describe.config import load_model_config
from weft.engine.loop.engine import Engine
from weft.engine.parts.decoder import decoder_spec
from weft.engine.start.startup import start
from weft.engine.wire.messages import EngineOptions, TokenLogprobs

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
    {"temperature": 0.7, "logprobs": 3, "logit_bias": {5: 2.0}},
    {"temperature": 0.0, "frequency_penalty": 0.5, "repetition_penalty": 1.1, "bad_words_token_ids": ((4, 5),)},
    {"temperature": 0.0, "prompt_logprobs": 2, "allowed_token_ids": (10, 11, 12)},
    {"temperature": 1.0, "logprobs": 0, "num_choices": 2},
]
"""Parameters of requests: between them every way to sample and to report."""

GOLDEN_SIZES = tuple(zip(WIDE_CHECKPOINTS, (16, 64) * 2, strict=True))
"""Models and sizes of blocks for a GPU: every size is compiled for every model, so each model has one."""

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
