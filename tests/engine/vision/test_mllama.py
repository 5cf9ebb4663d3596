"""Llama 3.2 Vision: layers that attend to pictures. Greedy ids are those of transformers."""

from pathlib import Path

import pytest
from transformers import PreTrainedModel

from tests.engine.vision.test_eyes import ids_of, started
from tests.mllama_picture_checkpoints import answered, write_mllama
from weft.engine.wire.inputs import TokensInput
from weft.engine.wire.messages import AddRequest
from weft.engine.wire.params import SamplingParams

Checkpoint = tuple[Path, PreTrainedModel]
NUM_IDS = 12


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("mllama")
    return folder, write_mllama(folder)


def test_a_text_is_answered_without_the_layers_that_see(checkpoint: Checkpoint) -> None:
    folder, model = checkpoint
    made, ids = answered(model, folder, "hello there, all of you", [], NUM_IDS)
    prompt = TokensInput(made["input_ids"][0].tolist())
    built = started(folder, pictures=False)
    assert ids_of(built, AddRequest(prompt, SamplingParams(temperature=0, max_tokens=NUM_IDS), request_id=1)) == [ids]
    assert built.info.vocab_size == model.config.text_config.vocab_size + 8
