from collections.abc import Callable

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from weft.engine.cache.specs import PagedKV
from weft.engine.fallback.attention_calls import RECORDING, MaskFunction, Reach, read_reach, record
from weft.engine.wire.errors import ModelError

SIZES: dict[str, object] = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}


def build(model_type: str, **changes: object) -> PreTrainedModel:
    config = AutoConfig.for_model(model_type, **(SIZES | {"num_key_value_heads": 2, "pad_token_id": 0} | changes))
    config._experts_implementation = "batched_mm"
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, attn_implementation=RECORDING
        )
    return model.eval()


def test_every_layer_is_found_as_the_module_uses_it() -> None:
    layer_types = ["sliding_attention", "full_attention"]
    calls = record(build("gemma2", head_dim=16, sliding_window=9, layer_types=layer_types), 128)
    assert calls.body == "model"
    assert [layer.name for layer in calls.layers] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert [layer.num_heads for layer in calls.layers] == [4, 4]
    assert [layer.cache for layer in calls.layers] == [
        PagedKV(2, 16, sliding_window=9, scale=256**-0.5, soft_cap=50.0, num_heads=4),
        PagedKV(2, 16, sliding_window=None, scale=256**-0.5, soft_cap=50.0, num_heads=4),
    ]


def test_a_window_as_long_as_the_context_is_none() -> None:
    model = build("mistral", sliding_window=60)
    assert record(model, 61).layers[0].cache.sliding_window == 60
    assert record(model, 60).layers[0].cache.sliding_window is None


@pytest.mark.parametrize(
    ("mask", "reach"),
    [
        (lambda batch, head, query, key: key <= query, (None, None)),
        (lambda batch, head, query, key: (key <= query) & (key > query - 7), (7, None)),
        (lambda batch, head, query, key: key == query, (1, None)),
        (lambda batch, head, query, key: (key <= query) & (key // 10 == query // 10), (None, 10)),
        (lambda batch, head, query, key: (key <= query) & (key // 49 == query // 49), (None, 49)),
        (lambda batch, head, query, key: key <= 2 * query, None),  # later tokens
        (
            lambda batch, head, query, key: (key <= query) & ((key + 3) // 10 == (query + 3) // 10),
            None,
        ),  # after padding
        (lambda batch, head, query, key: (key <= query) & ((key > query - 7) | (key == 0)), None),  # and the first
        (lambda batch, head, query, key: (key <= query) & (query - key) % 2 == 0, None),  # every second
    ],
)
def test_what_tokens_see_is_read_off_masks(mask: MaskFunction, reach: Reach | None) -> None:
    assert read_reach(mask, 50) == reach


def test_sinks_and_chunks_are_found() -> None:
    layer_types = ["sliding_attention", "full_attention"]
    with_sinks = record(build("gpt_oss", head_dim=16, sliding_window=9, layer_types=layer_types), 128)
    assert [layer.cache for layer in with_sinks.layers] == [
        PagedKV(2, 16, sliding_window=9, scale=0.25, has_sinks=True, num_heads=4),
        PagedKV(2, 16, scale=0.25, has_sinks=True, num_heads=4),
    ]
    layer_types = ["chunked_attention", "full_attention"]
    chunked = record(
        build("llama4_text", head_dim=16, attention_chunk_size=30, layer_types=layer_types, num_local_experts=2), 128
    )
    assert [layer.cache.span for layer in chunked.layers] == [30, None]


def test_a_mask_that_is_sliced_whole_is_known() -> None:
    """Gemma 4 slices the masks of the layers that share K/V to the rows that it keeps, here all."""
    layer_types = ["sliding_attention", "full_attention"] * 2
    sizes = {"num_hidden_layers": 4, "layer_types": layer_types, "num_kv_shared_layers": 2, "sliding_window": 9}
    calls = record(build("gemma4_text", **sizes), 128)
    assert [layer.cache.sliding_window for layer in calls.layers] == [9, None, 9, None]


@pytest.mark.parametrize(
    ("build_model", "fault"),
    [
        (lambda: build("bert"), "mask that is neither causal nor a sliding window"),
        (lambda: build("bloom", n_head=4), "does not go through transformers' AttentionInterface"),
        (lambda: build("diffllama"), "attends more than once"),
        (lambda: build("mamba"), "does not go through"),
    ],
)
def test_what_cannot_be_expressed_is_named(build_model: Callable[[], PreTrainedModel], fault: str) -> None:
    with pytest.raises(ModelError, match=fault):
        record(build_model(), 128)


def test_faults_of_a_module_are_told_in_one_line() -> None:
    """Here the heads are wider than the matrix after them."""
    with pytest.raises(ModelError, match=r"^its module does not run without data \(RuntimeError: [^\n]*\)$"):
        record(build("helium", head_dim=128), 128)
