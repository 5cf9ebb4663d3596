"""Reads and checks config.json and generation_config.json of a checkpoint.

Reads the JSON itself, so that start-up does not wait for transformers. Accepts both dialects of published checkpoints:
transformers 4 (rope_theta, rope_scaling, torch_dtype) and 5 (rope_parameters, dtype). Refuses with a `ModelError` what
the decoder does not compute.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from typing_extensions import override

from weft.engine.fields import Fields
from weft.engine.layers.gated import ACTIVATIONS, ALIASES
from weft.engine.layers.rotary import RopeConfig
from weft.engine.models.facts import ModelFacts
from weft.engine.models.families.family import FamilySwitches
from weft.engine.models.families.registry import Identity, identify
from weft.engine.models.rope import longest_context, read_ropes
from weft.engine.shared.errors import ModelError
from weft.engine.weights.scheme import Quantization

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class ModelConfig(ModelFacts):
    """A checkpoint's architecture and sizes, for Weft's own decoder.

    Attributes:
        max_position_embeddings: Longest context the checkpoint is meant for; YaRN's extension is included.
        ropes, sliding_windows: One entry per layer; None is full attention.
        activation: Of the feed-forward layers, a key of `weft.engine.layers.gated.ACTIVATIONS`.
        num_token_types: Types that a token may have; 1 for a model that knows none.
        num_draft_layers: Behind the last layer, heads that predict several tokens; they are not used.
        switches: What else differs between families. Where a field above has the same meaning, that one counts.
        quantization: How the checkpoint has its matrices; None as they are.
    """

    num_layers: int
    rms_norm_eps: float
    ropes: tuple[RopeConfig, ...]
    sliding_windows: tuple[int | None, ...]
    activation: str
    tie_word_embeddings: bool
    switches: FamilySwitches
    num_draft_layers: int = 0
    num_token_types: int = 1
    quantization: Quantization | None = None

    @property
    @override
    def is_bidirectional(self) -> bool:
        return self.switches.is_bidirectional

    @property
    @override
    def feed_forward_values(self) -> int:
        inner = [switches.num_values(self.hidden_size) for switches in self.switches.feed_forwards if switches]
        return max(self.intermediate_size, *inner, 0)

    @property
    @override
    def kept_values(self) -> int:
        return self.switches.extension.num_values(self.num_layers) if self.switches.extension else 0

    @property
    @override
    def position_values(self) -> int:
        return sum(2 * (rope.head_dim or self.head_dim) for rope in self.distinct_ropes if rope.rotary_dim != 0)

    @property
    def distinct_ropes(self) -> tuple[RopeConfig, ...]:
        """Every rotary embedding of the model once."""
        return tuple(dict.fromkeys(self.ropes))


def load_model_config(folder: Path) -> ModelConfig:
    """Read the configuration of a model folder in Hugging Face layout.

    Raises:
        ModelError: A file is missing or malformed, or the model needs something that is not supported.
    """
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such folder")
    return native_config(folder, identify(folder, "native"))


def native_config(folder: Path, identity: Identity) -> ModelConfig:
    """`load_model_config` of a folder whose family is known."""
    switches = identity.switches
    assert switches is not None
    fields = identity.fields.with_defaults(switches.defaults)
    vocab_size = fields.size("vocab_size")
    num_layers = fields.size("num_hidden_layers")
    hidden_size = fields.size("hidden_size")
    num_heads = fields.size("num_attention_heads")
    num_kv_heads = fields.size("num_key_value_heads", num_heads)
    head_dim = fields.size("head_dim", switches.head_dim or hidden_size // num_heads)
    if num_heads % num_kv_heads or head_dim % 2:
        raise ModelError(
            f"attention cannot have {num_heads} heads of {head_dim} values over {num_kv_heads} key-value heads"
        )
    if fields.integer("intermediate_size") < 0:
        raise fields.wrong("intermediate_size", "no negative integer")
    max_position_embeddings = fields.size("max_position_embeddings")
    if switches.counts_skipped:
        max_position_embeddings -= switches.num_positions_skipped
    windows = switches.sliding_windows or (None,) * num_layers
    ropes = read_ropes(fields, switches, windows, head_dim, max_position_embeddings)
    return ModelConfig(
        architecture=identity.architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=fields.integer("intermediate_size"),
        max_position_embeddings=longest_context(ropes, max_position_embeddings),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        ropes=ropes,
        sliding_windows=windows,
        activation=_read_activation(fields, switches),
        tie_word_embeddings=switches.is_bidirectional or fields.flag("tie_word_embeddings", switches.ties_embeddings),
        dtype=read_dtype(fields),
        eos_token_ids=read_eos_token_ids(folder, fields, vocab_size),
        switches=switches,
        num_draft_layers=fields.integer("num_nextn_predict_layers", 0),
        num_token_types=fields.size("type_vocab_size", 1) if switches.names.token_types else 1,
        quantization=identity.quantization,
    )


def _read_activation(fields: Fields, switches: FamilySwitches) -> str:
    activation = switches.activation or fields.optional_text("hidden_act") or "silu"
    activation = ALIASES.get(activation, activation)
    if activation not in ACTIVATIONS:
        raise ModelError(f"activation {activation} is not supported (supported: {', '.join(ACTIVATIONS)})")
    return activation


def read_dtype(fields: Fields) -> torch.dtype:
    """What config.json declares, float32 if it declares nothing; raises ModelError for other types."""
    name = fields.optional_text("dtype") or fields.optional_text("torch_dtype") or "float32"
    dtype = _DTYPES.get(name.removeprefix("torch."))
    if dtype is None:
        raise ModelError(f"dtype {name} is not supported (supported: {', '.join(_DTYPES)})")
    return dtype


def read_eos_token_ids(folder: Path, fields: Fields, vocab_size: int) -> tuple[int, ...]:
    """The ids that end an answer, without those beyond the vocabulary, which can never be sampled.

    Those that config.json names inside and outside of the text half count; if it names none, those of fields.
    """
    path, whole = folder / "generation_config.json", Fields.read(folder / "config.json")
    generation = Fields.read(path).integers("eos_token_id") if path.exists() else ()
    parts = [part.integers("eos_token_id") for part in (whole.section("text_config"), whole)]
    named = generation or tuple(dict.fromkeys(sum(parts, ()))) or fields.integers("eos_token_id")
    known = tuple(token_id for token_id in named if 0 <= token_id < vocab_size)
    if known != named:
        left_out = ", ".join(str(token_id) for token_id in named if token_id not in known)
        logger.warning("eos_token_id: %s left out, for token ids go from 0 to %d", left_out, vocab_size - 1)
    return known
