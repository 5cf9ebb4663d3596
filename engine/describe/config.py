"""Reads and checks config.json and generation_config.json of a checkpoint.

Reads the JSON itself, so that start-up does not wait for transformers. Accepts both dialects of published checkpoints:
transformers 4 (rope_theta, rope_scaling, torch_dtype) and 5 (rope_parameters, dtype). Refuses with a `ModelError` what
the decoder does not compute.
"""

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from typing_extensions import override

from weft.engine.families.registry import Identity, identify
from weft.engine.families.switches import FamilySwitches
from weft.engine.fields import MAX_CONTEXT, Fields, understood
from weft.engine.layers import rotary
from weft.engine.layers.feed_forward import ACTIVATIONS, ALIASES
from weft.engine.weights.quantization import Quantization
from weft.engine.wire.errors import ModelError
from weft.engine.wire.inputs import AudioShape
from weft.engine.wire.pictures import Vision

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Sizes and limits of a model: what the engine needs to know of it before anything is loaded, whoever computes it.

    Attributes:
        num_kv_heads, head_dim: Of the largest layer.
        intermediate_size: Widest activation of a token inside a layer.
        max_position_embeddings: Longest context that the model is meant for.
        dtype: What the checkpoint declares, float32 if it declares nothing.
        eos_token_ids: Ids that end an answer, from generation_config.json, else config.json. Each is an id of the
            vocabulary. May be empty.
        vision: How the checkpoint sees; None if only its text half is served, or there is no other.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]
    vision: Vision | None = field(default=None, kw_only=True)

    @property
    def is_bidirectional(self) -> bool:
        """Whether tokens see those behind them, so that a request is computed whole, in one step."""
        return False

    @property
    def num_mutual(self) -> int:
        """Most tokens of a picture, where these see each other in some layer; see `PagedKV`."""
        return 0

    @property
    def num_input_tokens(self) -> int:
        """Most tokens that an encoder reads; 0 without one. Then max_position_embeddings is that of the decoder."""
        return 0

    @property
    def audio(self) -> AudioShape | None:
        """What its encoder reads where that is sound; None for tokens."""
        return None

    @property
    def feed_forward_values(self) -> int:
        """Values of a token inside the widest feed-forward layer at once."""
        return self.intermediate_size

    @property
    def kept_values(self) -> int:
        """Values of a token that are kept through all layers, beside its hidden states."""
        return 0

    @property
    def position_values(self) -> int:
        """Values of each position in the tables that are made when the model is loaded."""
        return 0

    @property
    def short_context(self) -> int:
        """Tokens up to which a request has frequencies of its own, so that it is computed anew when it outgrows them.

        0 where frequencies are the same for all lengths.
        """
        return 0


@dataclass(frozen=True, slots=True)
class ModelConfig(ModelFacts):
    """A checkpoint's architecture and sizes, for Weft's own decoder.

    Attributes:
        max_position_embeddings: Longest context the checkpoint is meant for; YaRN's extension is included.
        num_positions: Of the embeddings of positions that the checkpoint has, where it has such; a limit on texts, such
            as sentence-transformers', may be lower.
        ropes, sliding_windows: One entry per layer; None is full attention.
        activation: Of the feed-forward layers, a key of `weft.engine.layers.feed_forward.ACTIVATIONS`.
        num_token_types: Types that a token may have; 1 for a model that knows none.
        num_draft_layers: Behind the last layer, heads that predict several tokens.
        switches: What else differs between families. Where a field above has the same meaning, that one counts.
        encoder: Of the encoder that the decoder reads; None for none.
        aligned: Layer and head of the attention to a sound that follows it in time, in order.
        quantization: How the checkpoint has its matrices; None as they are.
        tapped: Numbers of layers behind which hidden states are kept for a head that reads them.
        num_stacked: Layers behind which features of pictures are added, where pictures are served.
    """

    num_layers: int
    num_positions: int
    rms_norm_eps: float
    ropes: tuple[rotary.RopeConfig, ...]
    sliding_windows: tuple[int | None, ...]
    activation: str
    tie_word_embeddings: bool
    switches: FamilySwitches
    encoder: "ModelConfig | None" = None
    aligned: tuple[tuple[int, int], ...] = ()
    num_draft_layers: int = 0
    num_token_types: int = 1
    quantization: Quantization | None = None
    tapped: tuple[int, ...] = ()
    num_stacked: int = 0

    @property
    @override
    def is_bidirectional(self) -> bool:
        return self.switches.is_bidirectional

    @property
    @override
    def num_mutual(self) -> int:
        return self.vision.longest if self.vision and self.switches.mutual else 0

    @property
    @override
    def num_input_tokens(self) -> int:
        return self.encoder.num_positions if self.encoder else 0

    @property
    @override
    def audio(self) -> AudioShape | None:
        hearing = self.encoder.switches.hearing if self.encoder else None
        return hearing.shape if hearing else None

    @property
    @override
    def feed_forward_values(self) -> int:
        inner = [switches.num_values(self.hidden_size) for switches in self.switches.feed_forwards if switches]
        return max(self.intermediate_size, *inner, 0)

    @property
    @override
    def kept_values(self) -> int:
        inputs = self.switches.extension.num_values(self.num_layers) if self.switches.extension else 0
        return inputs + len(self.tapped) * self.hidden_size

    @property
    @override
    def position_values(self) -> int:
        return sum(2 * (rope.head_dim or self.head_dim) for rope in self.distinct_ropes if rope.rotary_dim != 0)

    @property
    @override
    def short_context(self) -> int:
        scalings = [rope.scaling for rope in self.ropes if isinstance(rope.scaling, rotary.LongScaling)]
        return min((scaling.original_max_position_embeddings for scaling in scalings), default=0)

    @property
    def distinct_ropes(self) -> tuple[rotary.RopeConfig, ...]:
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
    with understood(folder / "config.json"):
        return _native_config(folder, identity)


def _native_config(folder: Path, identity: Identity) -> ModelConfig:
    switches = identity.switches
    assert switches is not None
    fields = identity.fields.with_defaults(switches.defaults).with_values(switches.sizes)
    vocab_size = fields.size("vocab_size")
    num_layers = fields.size("num_hidden_layers")
    hidden_size = fields.size("hidden_size")
    num_heads = fields.size("num_attention_heads")
    num_kv_heads = fields.size("num_key_value_heads", num_heads)
    head_dim = fields.size("head_dim", switches.head_dim or hidden_size // num_heads)
    if num_heads % num_kv_heads or head_dim % 2:
        message = f"attention cannot have {num_heads} heads of {head_dim} values over {num_kv_heads} key-value heads"
        raise ModelError(message)
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
        num_positions=max_position_embeddings,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        ropes=ropes,
        sliding_windows=windows,
        activation=_read_activation(fields, switches),
        tie_word_embeddings=switches.is_bidirectional or fields.flag("tie_word_embeddings", switches.ties_embeddings),
        dtype=read_dtype(fields),
        eos_token_ids=read_eos_token_ids(folder, fields, vocab_size),
        switches=switches,
        encoder=_native_config(folder, replace(identity, switches=switches.encoder)) if switches.encoder else None,
        aligned=_read_aligned(folder, switches, num_layers, num_heads),
        num_draft_layers=fields.integer("num_nextn_predict_layers", 0),
        num_token_types=fields.size("type_vocab_size", 1) if switches.names.token_types else 1,
        quantization=identity.quantization,
    )


def _read_aligned(
    folder: Path, switches: FamilySwitches, num_layers: int, num_heads: int
) -> tuple[tuple[int, int], ...]:
    """`alignment_heads` of generation_config.json, without those that the model does not have."""
    path, hearing = folder / "generation_config.json", switches.encoder.hearing if switches.encoder else None
    if hearing is None or not hearing.shape.is_padded or not path.exists():
        return ()
    named = Fields.read(path).raw("alignment_heads")
    known = ((layer, head) for layer in range(num_layers) for head in range(num_heads))
    return tuple(pair for pair in known if list(pair) in named) if isinstance(named, list) else ()


def _read_activation(fields: Fields, switches: FamilySwitches) -> str:
    activation = switches.activation or fields.optional_text("hidden_act") or "silu"
    activation = ALIASES.get(activation, activation)
    if activation not in ACTIVATIONS:
        raise ModelError(f"activation {activation} is not supported (supported: {', '.join(ACTIVATIONS)})")
    return activation


_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


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


_DEFAULT_THETA = 10_000.0


def read_ropes(
    fields: Fields, switches: FamilySwitches, windows: Sequence[int | None], head_dim: int, longest: int
) -> tuple[rotary.RopeConfig, ...]:
    """The rotary embedding of every layer. What the rotary layer cannot compute is refused by name.

    Args:
        windows: Of every layer.
        longest: Longest context, before it is extended.

    Raises:
        ModelError: config.json asks for a type that is not supported.
    """
    kinds = {None: "full_attention"} | {window: "sliding_attention" for window in windows if window is not None}
    by_kind = {}
    if switches.has_rope:
        for window, kind in kinds.items():
            own_dim = switches.full_head_dim if window is None else None
            by_kind[window] = replace(read_rope(fields, own_dim or head_dim, longest, kind), head_dim=own_dim)
            if window is not None and switches.local_rope_theta is not None and not _sections(fields)[kind].names():
                by_kind[window] = replace(by_kind[window], theta=switches.local_rope_theta, scaling=None)
    return tuple(
        rotary.NO_ROPE if layer in switches.ropeless else by_kind.get(window, rotary.NO_ROPE)
        for layer, window in enumerate(windows)
    )


def read_rope(fields: Fields, head_dim: int, longest: int, kind: str = "full_attention") -> rotary.RopeConfig:
    """The rotary embedding that config.json asks for in layers of a kind, for heads of head_dim values."""
    by_kind = _sections(fields)
    section = by_kind[kind] if by_kind[kind].names() else by_kind[""]
    theta = section.number("rope_theta", fields.number("rope_theta", _DEFAULT_THETA))
    share = section.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    is_proportional = section.optional_text("rope_type") == "proportional"
    rotary_dim = head_dim if is_proportional else fields.integer("rotary_dim", int(head_dim * share))
    if rotary_dim % 2 or not 0 <= rotary_dim <= head_dim:
        raise ModelError(f"rotary embedding of {rotary_dim} values in heads of {head_dim} is not supported")
    if section.optional_text("type") == "dynamic" or section.optional_text("rope_type") == "dynamic":
        alpha = section.optional_number("alpha")  # Hunyuan's, for contexts of all lengths
        if alpha is not None:
            theta *= alpha ** (rotary_dim / (rotary_dim - 2))
    original = fields.integer("original_max_position_embeddings", longest)
    scaling = _read_scaling(section, original, longest, rotary_dim)
    return rotary.RopeConfig(theta, scaling, None if rotary_dim == head_dim else rotary_dim)


def _sections(fields: Fields) -> dict[str, Fields]:
    """The parameters by kind of layer; under "" what stands for all kinds."""
    section = fields.section("rope_scaling" if fields.has("rope_scaling") else "rope_parameters")
    kinds = {kind: section.section(kind) for kind in ("full_attention", "sliding_attention")}
    return {**kinds, "": section}


def _read_scaling(section: Fields, original: int, longest: int, rotary_dim: int) -> rotary.RopeScaling | None:
    original = section.integer("original_max_position_embeddings", original)
    match rope_type := section.optional_text("rope_type") or section.optional_text("type") or "default":
        case "default" | "mrope" | "dynamic":  # which differ for images, and for contexts beyond the longest
            return None
        case "proportional":
            share = section.number("partial_rotary_factor", 1.0)
            return rotary.ProportionalScaling(share, section.number("factor", 1.0))
        case "linear":
            return rotary.LinearScaling(section.number("factor"))
        case "llama3":
            low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
            if not low < high:
                raise section.wrong("high_freq_factor", f"above low_freq_factor, which is {low:g}")
            return rotary.Llama3Scaling(section.number("factor"), low, high, original_max_position_embeddings=original)
        case "yarn":
            factor = section.number("factor", longest / original)
            return rotary.YarnScaling(
                factor=factor,
                original_max_position_embeddings=original,
                attention_factor=_read_attention_factor(section, factor),
                beta_fast=section.number("beta_fast", 32.0),
                beta_slow=section.number("beta_slow", 1.0),
                truncate=section.flag("truncate", True),
            )
        case "longrope" | "su":
            short, long = (_read_factors(section, f"{kind}_factor", rotary_dim) for kind in ("short", "long"))
            extension = section.number("factor", longest / original)
            factor = math.sqrt(1 + math.log(extension) / math.log(original)) if extension > 1 else 1.0
            return rotary.LongScaling(short, long, original, section.number("attention_factor", factor))
    raise ModelError(
        f"rope type {rope_type} is not supported "
        "(supported: default, linear, dynamic, llama3, longrope, proportional, yarn)"
    )


def _read_factors(section: Fields, name: str, rotary_dim: int) -> tuple[float, ...]:
    factors = section.numbers(name)
    if len(factors) != rotary_dim // 2:
        raise section.wrong(name, f"a list of {rotary_dim // 2} numbers")
    return factors


def _read_attention_factor(section: Fields, factor: float) -> float:
    """YaRN's multiplier of cosine and sine: as given, or from the two mscales (DeepSeek), or from the factor alone."""
    given = section.optional_number("attention_factor")
    if given is not None:
        return given
    mscale, mscale_all_dim = section.number("mscale", 0.0), section.number("mscale_all_dim", 0.0)
    if mscale and mscale_all_dim:
        return _attention_factor(factor, mscale) / _attention_factor(factor, mscale_all_dim)
    return _attention_factor(factor, 1.0)


def _attention_factor(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def longest_context(ropes: Iterable[rotary.RopeConfig], longest: int) -> int:
    """How far positions reach.

    Published YaRN recipes leave max_position_embeddings at its value before the extension.
    """
    for rope in ropes:
        if isinstance(rope.scaling, rotary.YarnScaling):
            longest = max(longest, int(rope.scaling.factor * rope.scaling.original_max_position_embeddings))
    if longest > MAX_CONTEXT:
        message = f"the context must have at most {MAX_CONTEXT} tokens, the rotary embedding extends it to {longest}"
        raise ModelError(message)
    return longest
