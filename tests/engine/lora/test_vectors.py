"""Vectors of a model with adapters, and of one without beside them, in the steps that they share."""

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from tests.engine.lora.adapters_for_tests import write_adapter
from tests.engine.start.test_vector_model import NO_OUTPUT, run, started
from tests.vector_checkpoints import write_model
from weft.engine.wire.inputs import TokensInput
from weft.engine.wire.messages import AddRequest
from weft.engine.wire.options import find_adapter
from weft.engine.wire.params import Pooling

PROMPTS = [[5, 9, 17], [7] * 19]


def test_hidden_states_are_those_of_pefts_model(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "qwen3", AutoModelForCausalLM)
    reference = write_adapter(folder, tmp_path / "lora", target_modules=["q_proj", "down_proj"])
    engine = started(folder, task="embed", max_loras=1, max_lora_rank=8).engine
    engine.pending.adapters.load_first({"lora": str(tmp_path / "lora")})
    adapter = find_adapter("lora", tmp_path / "lora")
    pooling = Pooling(is_per_token=True)
    adds = [
        AddRequest(TokensInput(prompt), NO_OUTPUT, adapter=each, pooling=pooling)
        for prompt in PROMPTS
        for each in (adapter, None)
    ]
    outputs = run(engine, adds)
    for add in adds:
        with torch.no_grad():
            model = reference.base_model.model.model
            inputs = torch.tensor([add.input.token_ids])
            if add.adapter is None:
                with reference.disable_adapter():
                    expected = model(inputs).last_hidden_state[0]
            else:
                expected = model(inputs).last_hidden_state[0]
        found = np.frombuffer(outputs[add.request_id].values, "<f4").reshape(len(add.input.token_ids), -1)
        np.testing.assert_allclose(found, expected.numpy(), rtol=1e-3, atol=1e-4)
