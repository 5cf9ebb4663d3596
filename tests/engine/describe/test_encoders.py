"""Encoders and classifiers compute what transformers computes: hidden states and scores of each family."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, PretrainedConfig

from weft.engine.cache.specs import group_layers
from weft.engine.config import resolve
from weft.engine.describe.config import ModelConfig, load_model_config
from weft.engine.kernels.choice import make_caches
from weft.engine.kernels.cpu import library
from weft.engine.runner.dummy_batch import dummy_batch
from weft.engine.start.model_choice import plan_model, read_model
from weft.engine.start.vector_model import find_task, read_vector_model
from weft.engine.wire.errors import ModelError
from weft.engine.wire.messages import EngineOptions

LENGTHS = (70, 7, 1, 40)
"""Of the texts in one step; one is longer than the windows, one has a single token."""

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
MODERN: dict[str, Any] = SIZES | {"local_attention": 16, "global_attn_every_n_layers": 3, "cls_token_id": 0}
DISTILBERT: dict[str, Any] = {"vocab_size": 96, "dim": 64, "n_layers": 3, "n_heads": 2, "hidden_dim": 96}
DISTILBERT |= {"max_position_embeddings": 128, "initializer_range": 0.2}

ENCODERS: dict[str, dict[str, Any]] = {
    "bert": SIZES | {"type_vocab_size": 2},
    "roberta": SIZES | {"type_vocab_size": 1},
    "xlm-roberta": SIZES | {"type_vocab_size": 1},
    "distilbert": DISTILBERT,
    "modernbert": MODERN,
}
CLASSIFIERS: dict[str, dict[str, Any]] = ENCODERS | {
    "qwen2": SIZES | {"num_key_value_heads": 1},
    "qwen3": SIZES | {"num_key_value_heads": 1, "head_dim": 32},
    "llama": SIZES,
}


def write(folder: Path, name: str, auto: Any = AutoModel, **changes: Any) -> Any:
    """A checkpoint with random weights in every tensor, and the module that wrote it."""
    config: PretrainedConfig = AutoConfig.for_model(name, **(CLASSIFIERS[name] | changes))
    torch.manual_seed(0)
    module = auto.from_config(config).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    module.save_pretrained(folder)
    return module


@torch.inference_mode()
def compute(
    folder: Path, texts: list[torch.Tensor], dtype: str = "float32", types: torch.Tensor | None = None
) -> tuple[list[torch.Tensor], Any, ModelConfig]:
    """The hidden states of texts in one step, the model, and its configuration."""
    model = read_model(folder, "native")
    assert isinstance(model, ModelConfig)
    config = resolve(EngineOptions(model=str(folder), device="cpu", dtype=dtype, block_size=32), model)
    plan = plan_model(model, config)
    assert ("native" in plan.name) is (dtype == "bfloat16")
    loaded = plan.load(folder, lambda done, total: None)
    groups, longest = group_layers(loaded.cache_specs), max(map(len, texts))
    batch = dummy_batch(len(texts) * longest, [group.spec for group in groups], 32, 1, longest)
    keep = np.concatenate([i * longest + np.arange(len(text)) for i, text in enumerate(texts)])
    lengths = np.array([len(text) for text in texts])
    starts = np.append(0, lengths.cumsum())
    paged = [type(group)(group.slot_mapping[keep], group.block_tables, group.block_copies) for group in batch.groups]
    batch = type(batch)(
        **{name: getattr(batch, name) for name in ("placeholders", "row_indices", "sampling")},
        token_ids=torch.cat(texts).numpy(),
        positions=batch.positions[keep],
        query_start_locs=starts,
        seq_lens=lengths,
        groups=tuple(paged),
    )
    caches = make_caches(groups, 1 + len(texts) * -(-longest // 32), config, model.num_heads)
    positions = torch.from_numpy(batch.positions)
    if types is not None:
        positions = loaded.typed(positions, types)
    hidden = loaded.forward(torch.cat(texts), positions, caches.begin(batch))
    return list(torch.split(hidden.clone(), lengths.tolist())), loaded, model


def texts() -> list[torch.Tensor]:
    """Random ids that are no special tokens."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 96, (length,), generator=generator) for length in LENGTHS]


@pytest.mark.parametrize("name", ENCODERS)
def test_hidden_states_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    module = write(tmp_path, name)
    hidden, _, _ = compute(tmp_path, texts())
    for text, got in zip(texts(), hidden, strict=True):
        with torch.inference_mode():
            expected = module(text[None]).last_hidden_state[0]
        assert expected.std() > 0.1
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_scores_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    options = {"classifier_pooling": "mean"} if name == "modernbert" else {}
    module = write(tmp_path, name, AutoModelForSequenceClassification, num_labels=3, **options)
    hidden, _, config = compute(tmp_path, texts())
    model = read_vector_model(tmp_path, find_task(tmp_path, "auto"), config, EngineOptions(model=str(tmp_path)))
    assert model is not None and len(model.info.labels) == 3
    for text, got in zip(texts(), hidden, strict=True):
        with torch.inference_mode():
            expected = module(text[None]).logits[0]
            pooled = {"cls": got[0], "last": got[-1], "mean": got.mean(0)}[model.kind]
            torch.testing.assert_close(torch.from_numpy(model.head(pooled.numpy())), expected, rtol=1e-5, atol=1e-4)


def test_types_of_tokens_are_embedded(tmp_path: Path) -> None:
    """Those that a model does not have are its last one."""
    module, text = write(tmp_path, "bert"), texts()[0]
    types = torch.arange(len(text)) // 30
    hidden, _, _ = compute(tmp_path, [text], types=types)
    with torch.inference_mode():
        expected = module(text[None], token_type_ids=types.clamp(max=1)[None]).last_hidden_state[0]
    torch.testing.assert_close(hidden[0], expected, rtol=1e-5, atol=1e-4)


@pytest.mark.skipif(library.load() is None, reason="native kernels are not compiled here")
@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert"])
def test_native_kernels_compute_the_same_in_bfloat16(tmp_path: Path, name: str) -> None:
    write(tmp_path, name)
    exact, got = (compute(tmp_path, texts(), dtype)[0] for dtype in ("float32", "bfloat16"))
    for one, other in zip(exact, got, strict=True):
        assert ((one - other.float()).norm() / one.norm()).item() < 0.03


@pytest.mark.skipif(library.load() is None, reason="native kernels are not compiled here")
def test_long_texts_reach_over_chunks(tmp_path: Path) -> None:
    """Native attention cuts contexts at 256 tokens; texts behind such a cut are seen from before it."""
    write(tmp_path, "modernbert", max_position_embeddings=1024, local_attention=300)
    generator = torch.Generator().manual_seed(2)
    long = [torch.randint(3, 96, (length,), generator=generator) for length in (700, 256, 257)]
    exact, got = (compute(tmp_path, long, dtype)[0] for dtype in ("float32", "bfloat16"))
    for one, other in zip(exact, got, strict=True):
        assert ((one - other.float()).norm() / one.norm()).item() < 0.03


def test_texts_of_a_step_do_not_see_each_other(tmp_path: Path) -> None:
    write(tmp_path, "bert")
    together = compute(tmp_path, texts(), "bfloat16")[0]
    for text, got in zip(texts(), together, strict=True):
        assert torch.equal(compute(tmp_path, [text], "bfloat16")[0][0], got)


def test_layers_share_one_cache(tmp_path: Path) -> None:
    """No later step reads keys and values, so they are kept for one layer of each kind only."""
    write(tmp_path, "modernbert")
    _, model, _ = compute(tmp_path, texts())
    assert len(model.cache_specs) == 2


def test_a_step_holds_the_longest_text(tmp_path: Path) -> None:
    write(tmp_path, "modernbert", max_position_embeddings=5000)
    model = load_model_config(tmp_path)
    assert resolve(EngineOptions(model=str(tmp_path)), model).max_num_batched_tokens == 5000
    assert resolve(EngineOptions(model=str(tmp_path), max_num_batched_tokens=600), model).max_model_len == 600


def test_relative_positions_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "bert")
    path = tmp_path / "config.json"
    path.write_text(
        path.read_text().replace('"type_vocab_size"', '"position_embedding_type": "relative_key", "type_vocab_size"')
    )
    with pytest.raises(ModelError, match="relative positions"):
        load_model_config(tmp_path)
