"""What a checkpoint is: config.json and generation_config.json, checked and made uniform.

Reads JSON itself, in both dialects of published checkpoints (transformers 4: rope_theta, rope_scaling, torch_dtype;
5: rope_parameters, dtype), so that start-up does not wait for transformers. Refuses with a `ModelError` what the
decoder does not compute.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from weft.engine.layers.gated import ACTIVATIONS
from weft.engine.layers.rotary import RopeConfig, YarnScaling
from weft.engine.models.families.family import FamilySwitches
from weft.engine.models.families.fields import Fields
from weft.engine.models.families.registry import identify
from weft.engine.models.rope import read_rope
from weft.engine.shared.errors import ModelError

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A checkpoint's architecture and sizes.

    Attributes:
        max_position_embeddings: Longest context the checkpoint is meant for; YaRN's extension is included.
        sliding_windows: One entry per layer; None is full attention.
        norm_offset, has_post_norms, embedding_scale, attention_scale, attention_soft_cap, logit_soft_cap: See
            `FamilySwitches`.
        activation: Of the feed-forward layers, a key of `weft.engine.layers.gated.ACTIVATIONS`.
        dtype: What the checkpoint declares; float32 when it declares nothing.
        eos_token_ids: Ids that end an answer, from generation_config.json, else config.json; may be empty.
            Each is an id of the vocabulary.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]
    norm_offset: float
    has_post_norms: bool
    embedding_scale: float
    attention_scale: float | None
    attention_soft_cap: float | None
    logit_soft_cap: float | None
    activation: str
    tie_word_embeddings: bool
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]


def load_model_config(folder: Path) -> ModelConfig:
    """Read the configuration of a model folder in Hugging Face layout.

    Raises:
        ModelError: A file is missing or malformed, or the model needs something that is not supported.
    """
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such folder")
    identity = identify(folder)
    fields, switches = identity.fields, identity.switches
    vocab_size = fields.integer("vocab_size")
    num_layers = fields.integer("num_hidden_layers")
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    head_dim = fields.integer("head_dim", switches.head_dim or hidden_size // num_heads)
    if num_heads % num_kv_heads or head_dim % 2:
        raise ModelError(
            f"attention cannot have {num_heads} heads of {head_dim} values over {num_kv_heads} key-value heads"
        )
    max_position_embeddings = fields.integer("max_position_embeddings")
    rope = read_rope(fields, max_position_embeddings)
    return ModelConfig(
        architecture=identity.architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=fields.integer("intermediate_size"),
        max_position_embeddings=_longest_context(rope, max_position_embeddings),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        qkv_bias=switches.qkv_bias,
        o_bias=switches.o_bias,
        mlp_bias=switches.mlp_bias,
        qk_norm=switches.qk_norm,
        sliding_windows=switches.sliding_windows or (None,) * num_layers,
        norm_offset=switches.norm_offset,
        has_post_norms=switches.has_post_norms,
        embedding_scale=switches.embedding_scale,
        attention_scale=switches.attention_scale,
        attention_soft_cap=switches.attention_soft_cap,
        logit_soft_cap=switches.logit_soft_cap,
        activation=_read_activation(fields, switches),
        tie_word_embeddings=fields.flag("tie_word_embeddings", switches.ties_embeddings),
        dtype=_read_dtype(fields),
        eos_token_ids=_read_eos_token_ids(folder, fields, vocab_size),
    )


def _read_activation(fields: Fields, switches: FamilySwitches) -> str:
    activation = switches.activation or fields.optional_text("hidden_act") or "silu"
    if activation not in ACTIVATIONS:
        raise ModelError(f"activation {activation} is not supported (supported: {', '.join(ACTIVATIONS)})")
    return activation


def _longest_context(rope: RopeConfig, max_position_embeddings: int) -> int:
    """Published YaRN recipes leave max_position_embeddings at what it was before the extension."""
    if isinstance(rope.scaling, YarnScaling):
        extended = int(rope.scaling.factor * rope.scaling.original_max_position_embeddings)
        return max(max_position_embeddings, extended)
    return max_position_embeddings


def _read_dtype(fields: Fields) -> torch.dtype:
    name = fields.optional_text("dtype") or fields.optional_text("torch_dtype") or "float32"
    dtype = _DTYPES.get(name.removeprefix("torch."))
    if dtype is None:
        raise ModelError(f"dtype {name} is not supported (supported: {', '.join(_DTYPES)})")
    return dtype


def _read_eos_token_ids(folder: Path, fields: Fields, vocab_size: int) -> tuple[int, ...]:
    """Ids that no logit belongs to are left out: nothing can be sampled that ends an output by them."""
    path = folder / "generation_config.json"
    generation = Fields.read(path).integers("eos_token_id") if path.exists() else ()
    named = generation or fields.integers("eos_token_id")
    known = tuple(token_id for token_id in named if 0 <= token_id < vocab_size)
    if known != named:
        left_out = ", ".join(str(token_id) for token_id in named if token_id not in known)
        logger.warning("eos_token_id: %s left out, for token ids go from 0 to %d", left_out, vocab_size - 1)
    return known
