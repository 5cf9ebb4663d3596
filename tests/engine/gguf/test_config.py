"""What a GGUF file says of a model becomes a config.json, or one line that names the fault."""

from pathlib import Path
from typing import Any

import pytest

from weft.engine.gguf.config import describe
from weft.engine.gguf.file import GgufError, GgufModel, GgufTensor

FILE = Path("m.gguf")
METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 48,
    "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


def model(tensors: dict[str, GgufTensor] | None = None, **values: Any) -> GgufModel:
    metadata = METADATA | {f"llama.{key.replace('__', '.')}": value for key, value in values.items()}
    shapes = {"token_embd.weight": (300, 32), "blk.0.attn_q.weight": (32, 32), "blk.0.ffn_gate_exps.weight": (4, 8, 32)}
    own = {
        name: GgufTensor(FILE, "F16", shape, 64, 0) for name, shape in shapes.items() if values or "exps" not in name
    }
    return GgufModel((FILE,), metadata, own | (tensors or {}))


def test_what_the_file_says_is_in_the_configuration() -> None:
    config = describe(model(), [])
    assert {
        key: config[key] for key in ("architectures", "vocab_size", "head_dim", "num_key_value_heads", "dtype")
    } == {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 300,
        "head_dim": 8,
        "num_key_value_heads": 4,
        "dtype": "bfloat16",
    }
    tensors = config["quantization_config"]["tensors"]  # type: ignore[index]
    assert tensors["model.layers.0.self_attn.q_proj.weight"]["heads"] == 4
    assert config["tie_word_embeddings"] is True and config["rope_scaling"] is None


@pytest.mark.parametrize("key", ["rope__scaling__factor", "rope__scale_linear"])
def test_a_factor_of_positions_without_a_type_is_linear(key: str) -> None:
    """It was left out of account."""
    experts = {"expert_count": 4, "expert_used_count": 2}
    assert describe(model(**{key: 4.0}, **experts), [])["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    assert describe(model(**{key: 4.0}, **experts, rope__scaling__type="none"), [])["rope_scaling"] is None


def test_numbers_by_layer_are_one_if_they_are_the_same() -> None:
    config = describe(
        model(expert_count=4, expert_used_count=2, attention__head_count_kv=[2], feed_forward_length=[48]),
        [],
    )
    assert (config["num_key_value_heads"], config["architectures"]) == (2, ["MixtralForCausalLM"])


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"block_count": 1 << 60}, "block_count is 1,152,921,504,606,846,976, and the file has 3 tensors"),
        ({"attention__head_count": 0}, "attention cannot have 0 heads of 32 values over 0"),
        ({"attention__head_count": "4"}, "llama.attention.head_count must be a number from 0 on, got '4'"),
        ({"attention__head_count_kv": 0}, "attention cannot have 4 heads of 8 values over 0"),
        ({"attention__head_count_kv": [1, 2]}, "llama.attention.head_count_kv differs between layers"),
        ({"attention__head_count": 64}, "attention cannot have 64 heads of 0 values over 64"),
        ({"attention__key_length": 8, "attention__value_length": 4}, "attention.value_length 4 is not"),
        ({"attention__head_count": 3}, "tensor blk.0.attn_q.weight has 32 rows for 3 heads"),
        ({"attention__causal": False}, "models whose attention is not causal are not supported as GGUF files"),
        ({"rope__freq_base": float("nan")}, "llama.rope.freq_base must be of type float, got 'nan'"),
        ({"rope__scaling__type": "yarn", "rope__scaling__factor": -1.0}, "rope.scaling.type yarn is not supported"),
        ({"rope__scaling__type": "new"}, "rope.scaling.type new is not supported (supported: none, linear, yarn"),
        (
            {"expert_count": 8, "expert_used_count": 2},
            "tensor blk.0.ffn_gate_exps.weight has 4 experts, expert_count is 8",
        ),
        ({"context_length": None}, "the file lacks llama.context_length"),
    ],
)
def test_faults_are_one_line(values: dict[str, Any], fault: str) -> None:
    with pytest.raises(GgufError) as caught:
        describe(model(**values), [])
    assert str(caught.value).startswith(fault) and "\n" not in str(caught.value)
