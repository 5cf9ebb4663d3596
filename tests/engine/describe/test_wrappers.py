"""Checkpoints that also read images or sounds: their text half answers as it does alone."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import CHECKPOINTS, write_checkpoint
from tests.engine.fallback.checkpoints import write as write_other
from tests.engine.test_golden import run
from weft.engine.describe.config import ModelConfig
from weft.engine.families.registry import identify
from weft.engine.start.model_choice import read_model
from weft.engine.start.startup import start
from weft.engine.wire.inputs import TokensInput
from weft.engine.wire.messages import AddRequest, EngineOptions
from weft.engine.wire.params import SamplingParams

PROMPT = list(range(4, 30))


def wrap(folder: Path, architecture: str, model_type: str, text_type: str | None, prefix: str) -> None:
    """Make the text half of a larger checkpoint of a model; text_type None leaves the fields where they are."""
    path = folder / "config.json"
    text = json.loads(path.read_text())
    outer = {"architectures": [architecture], "model_type": model_type, "vision_config": {"depth": 1}}
    if text_type is None:
        wrapped = text | outer
    else:
        inherited = {name: text.pop(name) for name in ("dtype", "eos_token_id", "tie_word_embeddings") if name in text}
        wrapped = outer | inherited | {"text_config": text | {"model_type": text_type, "architectures": None}}
    path.write_text(json.dumps(wrapped))
    tensors = load_file(folder / "model.safetensors")
    renamed = {
        name.replace("model.", prefix, 1) if name.startswith("model.") else name: t for name, t in tensors.items()
    }
    save_file(renamed | {"visual.blocks.0.weight": torch.ones(3)}, folder / "model.safetensors")


def answer(folder: Path) -> list[int]:
    options = EngineOptions(model=str(folder), device="cpu", dtype="float32", kv_cache_memory=1 << 22)
    request = AddRequest(TokensInput(PROMPT), SamplingParams(temperature=0, max_tokens=6), request_id=1)
    return list(run(start(options, "test").engine, [request])[1, 0].token_ids)


@pytest.mark.parametrize(
    ("name", "architecture", "model_type", "text_type", "prefix"),
    [
        ("llama2", "LlavaForConditionalGeneration", "llava", "llama", "language_model.model."),
        ("mistral", "Mistral3ForConditionalGeneration", "mistral3", "mistral", "model.language_model."),
        ("qwen3", "Qwen3VLForConditionalGeneration", "qwen3_vl", "qwen3_vl_text", "model.language_model."),
        ("qwen2", "Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", None, "model."),
        ("phi3", "LlavaForConditionalGeneration", "llava", "phi3", "language_model.model."),
    ],
)
def test_the_text_half_answers_as_it_does_alone(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    name: str,
    architecture: str,
    model_type: str,
    text_type: str | None,
    prefix: str,
) -> None:
    if name in CHECKPOINTS:
        write_checkpoint(CHECKPOINTS[name], tmp_path)
    else:
        write_other(name, tmp_path)
    alone = answer(tmp_path)
    assert "images" not in caplog.text
    wrap(tmp_path, architecture, model_type, text_type, prefix)
    assert answer(tmp_path) == alone
    assert "only text is served: images and sounds are not read" in caplog.text


def test_a_head_of_its_own_is_planned(tmp_path: Path) -> None:
    """`weft plan` counted none: 1.1 GB of Ministral 3 8B. A half that is not tied in words may have none all the same.

    Before the weights are there, config.json counts.
    """
    write_checkpoint(CHECKPOINTS["mistral"], tmp_path)
    wrap(tmp_path, "Mistral3ForConditionalGeneration", "mistral3", "mistral", "model.language_model.")
    facts = read_model(tmp_path, "native")
    assert isinstance(facts, ModelConfig) and not facts.tie_word_embeddings
    path = tmp_path / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(path).items() if "lm_head" not in name}
    save_file(tensors, path)
    assert read_model(tmp_path, "native") == dataclasses.replace(facts, tie_word_embeddings=True)
    path.unlink()
    assert read_model(tmp_path, "native") == facts


def test_what_the_text_half_leaves_out_is_read_from_the_outside(tmp_path: Path) -> None:
    write_checkpoint(CHECKPOINTS["qwen3"], tmp_path)
    wrap(tmp_path, "Qwen3VLForConditionalGeneration", "qwen3_vl", "qwen3_vl_text", "model.language_model.")
    identity = identify(tmp_path, "native")
    assert identity.architecture == "Qwen3ForCausalLM"
    assert identity.fields.flag("tie_word_embeddings", False)
    assert read_model(tmp_path, "auto").eos_token_ids == (2, 3)


def test_fields_of_a_class_that_are_left_out_are_its_defaults(tmp_path: Path) -> None:
    """As in LLaVA 1.5, whose text_config names but what differs from Llama 2 7B."""
    text = {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32_064}
    config = {"architectures": ["LlavaForConditionalGeneration"], "text_config": text, "torch_dtype": "float16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    facts = read_model(tmp_path, "native")
    assert (facts.vocab_size, facts.hidden_size, facts.intermediate_size, facts.head_dim) == (32_064, 4096, 11_008, 128)
    assert facts.dtype == torch.float16
    assert facts.eos_token_ids == (2,)


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
@pytest.mark.parametrize(
    ("inside", "outside", "both"), [(1, [1, 106], (1, 106)), (None, 7, (7,)), (5, None, (5,)), (None, None, (2,))]
)
def test_an_answer_ends_with_what_either_half_names(
    tmp_path: Path, model_impl: str, inside: object, outside: object, both: tuple[int, ...]
) -> None:
    """Gemma 4's text_config hid the end of a turn, 106; Mistral Small names none, and its answers had no end."""
    write_checkpoint(CHECKPOINTS["mistral"], tmp_path)
    path = tmp_path / "config.json"
    text = {k: v for k, v in json.loads(path.read_text()).items() if k != "eos_token_id"}
    outer = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"}
    for half, named in ((text, inside), (outer, outside)):
        half |= {"eos_token_id": named} if named else {}
    path.write_text(json.dumps(outer | {"text_config": text}))
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    assert read_model(tmp_path, model_impl).eos_token_ids == both
