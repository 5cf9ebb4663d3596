"""Engines that start on a GPU that is not there, as the server starts them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.checkpoints import Checkpoint, write_config
from tests.fake_gpu.gpu import FakeGpu
from weft.engine.loop.engine import Engine
from weft.engine.start.startup import start
from weft.engine.wire.messages import EngineOptions


@dataclass(frozen=True)
class Warm:
    """An engine after its start-up, and the GPU that it believes in, which is to be entered for each step."""

    gpu: FakeGpu
    engine: Engine
    max_model_len: int
    vocab_size: int


def start_warm(folder: Path, gpu: FakeGpu, **options: Any) -> Warm:
    """Start from a folder with a configuration, and prepare what an idle engine prepares."""
    with gpu:
        options = {"model": str(folder), "device": "cuda", "load_format": "dummy", **options}
        started = start(EngineOptions(**options), "test")
        while started.engine.prepare(60.0) is not None:
            pass
    return Warm(gpu, started.engine, started.info.max_model_len, started.info.vocab_size)


def write_shape(checkpoint: Checkpoint, folder: Path, num_layers: int | None = None) -> Path:
    """Write the configuration of a model, with so many layers if that is not None; returns the folder."""
    changes = {} if num_layers is None else {"num_hidden_layers": num_layers, "layer_types": None}
    return write_config(checkpoint, folder, **changes)
