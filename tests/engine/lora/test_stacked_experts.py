"""Adapters of parameters that hold all experts, as PEFT writes them for models of transformers 5."""

from pathlib import Path

import pytest
import torch

from tests.architectures.checkpoints import write
from tests.engine.lora.adapters_for_tests import check_all, start_engine, write_adapter
from weft.engine.lora.peft_folder import AdapterConfig
from weft.engine.lora.targets import split
from weft.engine.wire.errors import ModelError


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_answers_are_those_of_peft(tmp_path: Path, name: str) -> None:
    model = write(name, tmp_path / "model")
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    settings = {"target_modules": ["q_proj"], "target_parameters": parameters}
    reference = write_adapter(model, tmp_path / "one", **settings)
    check_all(start_engine(model, {"one": tmp_path / "one"}), {"one": reference})


def test_other_shapes_are_refused() -> None:
    parts = {"lora_A": torch.zeros(8, 4), "lora_B": torch.zeros(4, 8)}
    with pytest.raises(ModelError, match="no experts of the model have there"):
        list(split("model.layers.0.mlp.experts", parts, [], AdapterConfig(4, 4)))
