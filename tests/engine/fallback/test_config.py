import json
from pathlib import Path

import pytest
import torch

from tests.architectures.checkpoints import tiny_config
from tests.checkpoints import MAX_POSITION_EMBEDDINGS, VOCAB_SIZE
from tests.engine.fallback.checkpoints import write
from weft.engine.cache.specs import ModuleCache
from weft.engine.fallback.config import FallbackConfig, load_fallback_config
from weft.engine.families.registry import identify
from weft.engine.wire.errors import ModelError


def load(folder: Path, **changes: object) -> FallbackConfig:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return load_fallback_config(folder, identify(folder))


@pytest.fixture
def phi3(tmp_path: Path) -> Path:
    return write("phi3", tmp_path)


def test_facts_are_those_of_the_module(tmp_path: Path) -> None:
    config = load(write("qwen3_moe", tmp_path), torch_dtype="bfloat16", dtype="bfloat16")
    assert config.architecture == "Qwen3MoeForCausalLM"
    assert config.vocab_size == VOCAB_SIZE
    assert config.max_position_embeddings == MAX_POSITION_EMBEDDINGS
    assert config.dtype == torch.bfloat16
    assert config.eos_token_ids == (2, 3)
    assert (config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim) == (48, 4, 2, 16)
    assert config.intermediate_size == 2 * 2 * 32  # two experts, gate and up
    assert len(config.cache_specs) == 3


def test_a_context_is_as_long_as_one_set_of_frequencies(phi3: Path) -> None:
    """Beyond it, the frequencies of a request would depend on the other requests of its step."""
    factors = [1.0] * 6
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": factors, "long_factor": [2.0] * 6}
    config = load(phi3, rope_parameters=rope, original_max_position_embeddings=64)
    assert config.max_position_embeddings == 64


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"architectures": ["NewForCausalLM"], "model_type": "new"}, "transformers 5.* has no model of this name"),
        ({"architectures": ["Phi3ForTokenClassification"]}, "Phi3ForTokenClassification is not supported"),
        (
            {"architectures": ["NewForCausalLM"], "model_type": "new", "auto_map": {"AutoModelForCausalLM": "a.B"}},
            "NewForCausalLM comes with code of its own, and Weft runs no code of checkpoints",
        ),
        ({"num_attention_heads": "four"}, "num_attention_heads"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized checkpoints are not supported"),
    ],
)
def test_refusals_name_the_fault(phi3: Path, changes: dict[str, object], fault: str) -> None:
    with pytest.raises(ModelError, match=fault) as caught:
        load(phi3, **changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("architecture", "model_type", "reason"),
    [
        ("DogeForCausalLM", "doge", "model.layers.0.self_attn changes its attention mask"),
        ("RwkvForCausalLM", "rwkv", "it keeps a recurrent state instead of keys and values"),
        ("Qwen3NextForCausalLM", "qwen3_next", "it has layers of type linear_attention"),
        ("BloomForCausalLM", "bloom", "its attention does not go through transformers' AttentionInterface"),
    ],
)
def test_what_weft_s_attention_cannot_do_runs_request_by_request(
    tmp_path: Path, architecture: str, model_type: str, reason: str
) -> None:
    values = {"architectures": [architecture], "model_type": model_type, "max_position_embeddings": 128}
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = load_fallback_config(tmp_path, identify(tmp_path, "transformers"))
    assert (config.calls, config.reason) == (None, reason)
    assert [type(spec) for spec in config.cache_specs] == [ModuleCache]


def test_the_text_half_is_served_where_the_whole_cannot_be_built(tmp_path: Path) -> None:
    """Gemma 3n was refused without timm, which its vision tower needs, and no reason was given."""
    text = tiny_config("gemma3n_text").to_dict()
    values = {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n", "text_config": text}
    values["vision_config"] = {"architecture": "none that there is"}
    (tmp_path / "config.json").write_text(json.dumps(values, default=str))
    config = load_fallback_config(tmp_path, identify(tmp_path))
    assert (config.model_class.__name__, config.is_half) == ("Gemma3nForCausalLM", True)
    text["hidden_activation"] = "none that there is"
    (tmp_path / "config.json").write_text(json.dumps(values, default=str))
    with pytest.raises(ModelError, match=r"its module cannot be built \(\w+: \w"):
        load_fallback_config(tmp_path, identify(tmp_path))


def test_code_in_a_checkpoint_is_not_needed_for_what_transformers_has(phi3: Path) -> None:
    assert load(phi3, auto_map={"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}).vocab_size == VOCAB_SIZE
