"""Where a decoder is cut into stages, and what is not cut."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.architectures.checkpoints import write
from tests.engine.guidance.demo import DEMO_MODEL
from weft.engine.describe.config import ModelConfig
from weft.engine.kernels.torch.layer_kernels import TorchKernels
from weft.engine.models.cut import _borders, find_stages, largest_groups
from weft.engine.models.loading import load_weights
from weft.engine.parts.decoder import decoder_spec
from weft.engine.start.model_choice import read_model
from weft.engine.wire.errors import ModelError


def model(folder: Path) -> ModelConfig:
    config = read_model(folder, "native")
    assert isinstance(config, ModelConfig)
    return config


@pytest.mark.parametrize(
    ("sizes", "extra", "num_stages", "borders"),
    [
        ([1, 1, 1, 1], 0, 2, (0, 2, 4)),
        ([1, 1, 1, 1], 2, 2, (0, 1, 4)),  # embedding and head weigh as much as two blocks
        ([4, 1, 1, 1, 1], 0, 2, (0, 1, 5)),
        ([1, 1, 1], 9, 3, (0, 1, 2, 3)),  # every stage has a block
    ],
)
def test_the_largest_stage_is_small(sizes: list[int], extra: int, num_stages: int, borders: tuple[int, ...]) -> None:
    assert _borders(sizes, extra, num_stages) == borders


def test_stages_have_all_weights_and_caches_once() -> None:
    spec = decoder_spec(model(DEMO_MODEL))
    stages = find_stages(spec, 3)
    parts = [stage.cut(spec) for stage in stages]
    assert sum((part.blocks for part in parts), ()) == spec.blocks
    assert sum(part.num_parameters for part in parts) == spec.num_parameters
    assert [part.embedding is None for part in parts] == [False, True, True]
    most = max(len(part.caches) for part in parts)
    assert [len(group.layers) for group in largest_groups(spec, stages)] == [most]


def test_more_stages_than_layers_are_refused() -> None:
    spec = decoder_spec(model(DEMO_MODEL))
    num_layers = len(spec.blocks)
    message = f"^pipeline_parallel_size must be at most {num_layers}, the number of layers of the model, got"
    with pytest.raises(ModelError, match=message):
        find_stages(spec, num_layers + 1)


def test_layers_that_read_others_are_refused(tmp_path: Path) -> None:
    spec = decoder_spec(model(write("gemma4_text", tmp_path)))
    with pytest.raises(ModelError, match=r"^pipeline_parallel_size 2: stages cannot divide layers that read keys"):
        find_stages(spec, 2)


def test_names_may_lack_their_first_part(tmp_path: Path) -> None:
    file = write("gpt2", tmp_path) / "model.safetensors"
    save_file({name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}, file)
    config = model(tmp_path)
    stage, _ = find_stages(decoder_spec(config), 2)
    sizes = {"device": torch.device("cpu"), "dtype": torch.float32, "max_model_len": 8}
    decoder = load_weights(tmp_path, config, TorchKernels(), stage=stage, **sizes)
    assert decoder.weights_bytes < decoder_spec(config).weights_bytes(TorchKernels(), torch.float32)
