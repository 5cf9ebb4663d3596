"""Writes tiny random checkpoints that make vectors, as sentence-transformers saves them, with a tokenizer.

What sentence-transformers itself computes from them is the reference.
"""

from pathlib import Path
from typing import Any

import torch
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

from tests.tokenizers_for_tests import byte_level

SIZES: dict[str, Any] = {
    "vocab_size": 768,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
ENCODERS = ("bert", "xlm-roberta", "modernbert")
ENCODER_SIZES = {key: SIZES[key] for key in ("vocab_size", "num_hidden_layers", "num_attention_heads")}
ENCODER_SIZES |= {"hidden_size": 64, "intermediate_size": 80, "max_position_embeddings": 258, "pad_token_id": 0}
TEXTS = ["the ring", "a", "kalo miren tusha? " * 9, "中文 да", "é"]
PROMPTS = {"query": "Find: ", "document": ""}


def write_model(folder: Path, model_type: str, auto: Any = AutoModel, **changes: Any) -> Path:
    """Weights, config.json and tokenizer of a model whose hidden states differ clearly; returns the folder."""
    torch.manual_seed(3)
    own = ENCODER_SIZES if model_type in ENCODERS else SIZES
    model = auto.from_config(AutoConfig.for_model(model_type, **(own | changes)), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level(), pad_token="<|endoftext|>", eos_token="<|im_end|>"
    )
    tokenizer.save_pretrained(folder)
    return folder


def write_embedder(folder: Path, model_type: str, mode: str, *, is_deep: bool = False, **changes: Any) -> Any:
    """A sentence-transformers model, saved into the folder: the reference. Deep: Dense and Normalize follow."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    bare = write_model(folder.with_name(folder.name + "-bare"), model_type, **changes)
    torch.manual_seed(4)
    transformer = Transformer(str(bare), max_seq_length=200)
    further = [Dense(48, 24, activation_function=torch.nn.Tanh()), Normalize()] if is_deep else []
    modules = [transformer, Pooling(transformer.get_embedding_dimension(), pooling_mode=mode), *further]  # type: ignore[arg-type]
    model = SentenceTransformer(modules=modules, prompts=PROMPTS if is_deep else None, device="cpu")
    model.save_pretrained(str(folder))
    return model


def write_classifier(folder: Path, num_labels: int) -> Path:
    """A Qwen3 with a score for each label."""
    return write_model(folder, "qwen3", AutoModelForSequenceClassification, num_labels=num_labels)


def write_reranker(folder: Path) -> Any:
    """A causal model that answers yes or no, as a CrossEncoder of sentence-transformers: the reference."""
    from sentence_transformers import CrossEncoder
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.cross_encoder.modules import LogitScore

    bare = write_model(folder.with_name(folder.name + "-bare"), "qwen3", AutoModelForCausalLM)
    (bare / "chat_template.jinja").write_text(RERANKING)
    transformer = Transformer(str(bare), transformer_task="text-generation", max_seq_length=200)
    model = CrossEncoder(modules=[transformer, LogitScore(300, 301)], device="cpu")
    model.save_pretrained(str(folder))
    return model


RERANKING = (
    "<|im_start|>user\n{% for m in messages if m.role in ('query', 'document') %}<{{ m.role }}>: {{ m.content }}\n"
    "{% endfor %}<|im_end|>\n<|im_start|>assistant\n"
)


def write_encoder(folder: Path, model_type: str, auto: Any = AutoModel, **changes: Any) -> Path:
    """An encoder with a tokenizer that puts tokens around texts and gives the second of a pair another type."""
    write_model(folder, model_type, auto, **changes)
    tokenizer = byte_level()
    tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A <|im_end|>",
        pair="<|im_start|> $A <|im_end|> $B:1 <|im_end|>:1",
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in ("<|im_start|>", "<|im_end|>")],
    )
    names = (
        ["input_ids", "attention_mask", "token_type_ids"] if model_type == "bert" else ["input_ids", "attention_mask"]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|endoftext|>", model_input_names=names, model_max_length=256
    )
    fast.save_pretrained(folder)
    return folder
