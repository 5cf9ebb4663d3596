"""The switches in which families of models differ, names of tensors among them; each family maps a config.json to them.

The defaults are Llama's. A function becomes a family by the decorator `family`.
"""

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from typing_extensions import override

from weft.engine.fields import Fields
from weft.engine.wire.errors import ModelError
from weft.engine.wire.inputs import AudioShape


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Names of modules, without `.weight` and `.bias`. All but the first five are behind the name of a layer.

    Attributes:
        layers: The list of layers; a layer's name is this, a dot, its index.
        positions: Learned embedding of positions.
        token_types: Learned embedding of the types of tokens.
        embedding_norm: Norm of embeddings.
        feed_forward_norm: Norm before the feed-forward layer, "" to share that of the mixer (parallel blocks).
        mixer_post_norm, feed_forward_post_norm: Norms of what the halves of a block add.
        qkv: One name if the checkpoint has the three stacked.
        gate_up: One name if the checkpoint has both stacked, or if there is no gate.
        bias: Of `DistanceBias`.
        cross_norm, cross_post_norm, cross_qkv, cross_output: Of attention to an encoder.
    """

    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"
    norm: str = "model.norm"
    head: str = "lm_head"
    positions: str = ""
    token_types: str = ""
    embedding_norm: str = ""
    mixer_norm: str = "input_layernorm"
    mixer_post_norm: str = "post_attention_layernorm"
    feed_forward_norm: str = "post_attention_layernorm"
    feed_forward_post_norm: str = "post_feedforward_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    output: str = "self_attn.o_proj"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    bias: str = ""
    cross_norm: str = ""
    cross_post_norm: str = ""
    cross_qkv: tuple[str, ...] = ()
    cross_output: str = ""


BLOOM = TensorNames(
    embedding="transformer.word_embeddings",
    layers="transformer.h",
    norm="transformer.ln_f",
    qkv=("self_attention.query_key_value",),
    output="self_attention.dense",
    gate_up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
)
GPT2 = TensorNames(
    embedding="transformer.wte",
    layers="transformer.h",
    norm="transformer.ln_f",
    mixer_norm="ln_1",
    feed_forward_norm="ln_2",
    qkv=("attn.c_attn",),
    output="attn.c_proj",
    gate_up=("mlp.c_fc",),
    down="mlp.c_proj",
)
GEMMA2 = TensorNames(feed_forward_norm="pre_feedforward_layernorm")
"""Norms on both sides of both halves."""


class UseModule(ModelError):
    """The family's parts cannot compute this checkpoint, and transformers' module may be able to."""


class MixerSwitches:
    """How a layer mixes tokens, if not by softmax attention as `FamilySwitches` describes it (see `mixer_spec`)."""

    __slots__ = ()


class FeedForwardSwitches:
    """How a layer computes each token by itself, if not by the dense layer (see `feed_forward_spec`)."""

    __slots__ = ()

    def num_values(self, hidden_size: int) -> int:
        """Values of a token inside the layer at once; 0 if a dense layer has as many."""
        return 0


class DecoderSwitches:
    """What a decoder has beside the blocks that `FamilySwitches` describes (see `extended_spec`)."""

    __slots__ = ()

    def num_values(self, num_layers: int) -> int:
        """Values that it keeps of a token through all layers."""
        return 0


class Norm(enum.Enum):
    """Norms of hidden states. The plain ones have no weights."""

    RMS = "RMSNorm"
    PLAIN_RMS = "RMSNorm without weights"
    LAYER_NORM = "LayerNorm"
    LAYER_NORM_WITHOUT_BIAS = "LayerNorm without bias"
    PLAIN_LAYER_NORM = "LayerNorm without weights"


class Norms(enum.Enum):
    """Where the norms of a block are.

    BEFORE: before each half. AFTER: behind what each half makes, before it is added. AROUND: both. PARALLEL: before the
    halves, which read the same hidden states. OF_SUM: behind each half, of the sum that it was added to.
    """

    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"
    PARALLEL = "parallel"
    OF_SUM = "of sum"


@dataclass(frozen=True, slots=True)
class QKNorm:
    """Norm of queries and keys.

    Attributes:
        over_all: Over all heads of a token, not over each.
        per_head: Each head has weights of its own.
        is_last: Behind the rotary embedding, not before it.
    """

    norm: Norm = Norm.RMS
    over_all: bool = False
    per_head: bool = False
    is_last: bool = False
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class Temperature:
    """Scores of a query grow with its position, see `TemperatureTable`, in the layers whose mixer says so."""

    strength: float
    period: int
    offset: int


@dataclass(frozen=True, slots=True)
class DistanceBias:
    """Learned numbers that are added to scores, by head and by how far the key is from the query (T5).

    Near distances have a number each, further ones share it in buckets that grow with the distance.

    Attributes:
        num_buckets: For both directions, where a token sees both.
        max_distance: From here on all have the same number.
        is_shared: Whether all layers have those of the first.
    """

    num_buckets: int
    max_distance: int
    is_shared: bool


@dataclass(frozen=True, slots=True)
class Sinusoid:
    """Positions as sines, then cosines (Vaswani et al., 2017, section 3.5).

    Attributes:
        first: The number of a request's first position.
        is_of_fairseq: Whether the slowest wave is the longest one, not the next longest.
    """

    first: int = 0
    is_of_fairseq: bool = False


@dataclass(frozen=True, slots=True)
class Convolution:
    """A convolution over time; padding is on both sides, and behind it come a bias, if there is one, and activation.

    Attributes:
        activation: gelu, tanh, or glu, which halves the outputs.
        norm: Name of a norm over all values of an input, "" for none.
    """

    name: str
    inputs: int
    outputs: int
    size: int
    stride: int
    padding: int = 0
    has_bias: bool = True
    activation: str = "gelu"
    norm: str = ""


@dataclass(frozen=True, slots=True)
class Hearing:
    """How an encoder reads sound: features of samples, then convolutions.

    Attributes:
        extractor: The class of transformers that makes features, as preprocessor_config.json says.
        shape: Its steps are those of features and convolutions.
        scale: Multiplier of what the convolutions make.
    """

    extractor: str
    shape: AudioShape
    convolutions: tuple[Convolution, ...]
    scale: float = 1.0


class Fused(enum.Enum):
    """How a checkpoint stacks queries, keys and values in one matrix: by kind, by head, or by key-value head.

    Each key-value head of GROUPS comes behind the query heads that read it.
    """

    STACKED = "stacked"
    HEADS = "heads"
    GROUPS = "groups"


class Halves(enum.Enum):
    """Which halves a block has: mixer, feed-forward layer, or both. The name of a single one's norm is `mixer_norm`."""

    BOTH = "both"
    MIXER = "mixer"
    FEED_FORWARD = "feed-forward"


@dataclass(frozen=True, slots=True)
class Classifier:
    """The head that turns the hidden states of one token, or their mean, into a score for each label.

    Attributes:
        scores: Name of the last matrix.
        dense: Name of a square matrix before it, "" for none.
        activation: Behind `dense`, as torch.nn names it.
        norm: Name of a LayerNorm behind that, "" for none; eps is its own.
        pooling: What the head reads: cls for the first token, mean for the mean, last for the last token.
    """

    scores: str
    dense: str = ""
    activation: str = "Tanh"
    norm: str = ""
    eps: float = 1e-5
    pooling: Literal["last", "mean", "cls"] = "cls"


@dataclass(frozen=True, slots=True)
class FamilySwitches:
    """The part of a `ModelConfig` that is read differently from family to family.

    Attributes:
        names: Of tensors.
        defaults: Values of fields that config.json may leave out, as transformers has them.
        sizes: Values of fields that count whatever config.json says.
        encoder: Of the encoder that the decoder reads, see `with_cross_attention`; None for none.
        bias: Added to scores by distance; None for none.
        sinusoid: In the place of an embedding of positions; None for none.
        hearing: Of an encoder that reads sound in the place of tokens; None for any other.
        num_unwritten_ids: Ids at the end of the vocabulary that have no logits.
        logit_bias: Name of a vector that is added to logits, if the checkpoint has it; "" for none.
        norm: Kind of all norms of hidden states.
        norms: Where they are.
        has_final_norm: Whether there is one behind the last block.
        qkv_bias, o_bias, mlp_bias, head_bias: Whether these projections have a bias; o_bias None: as qkv_bias says.
        key_bias: Whether that of keys has one where the others do.
        qk_norm: Norm of queries and keys; None for none.
        fused: How the checkpoint stacks queries, keys and values, if it has them in one matrix.
        is_transposed: Whether the checkpoint has its matrices as (inputs, outputs).
        is_interleaved: Whether the rotary embedding turns pairs of neighbours.
        has_rope: Whether there is a rotary embedding.
        ropeless: Layers without one, by index.
        local_rope_theta: Base of the rotary embedding of layers with a window, never scaled; None for none.
        temperature: Factors on queries by position, for mixers that ask for them; None for none.
        num_positions_skipped: Rows at the beginning of the embedding of positions that are never used.
        counts_skipped: Whether max_position_embeddings counts them.
        is_bidirectional: Whether a token sees the tokens behind it, too.
        mutual: Layers where the tokens of a picture see each other, by index; see `PagedKV`.
        classifier: The head of a classifier; None for any other model.
        unused: Beginnings of the names of tensors that checkpoints may hold and nothing reads.
        normless: Layers without a norm before attention, by index.
        clip: Bound on the values of queries, keys and values; None for none.
        sinks: Name of the sinks behind that of a layer, see `AttentionStep.attend`; "" for none.
        slopes: Of ALiBi, one for each head, see `PagedKV`; empty for none.
        sliding_windows: Per layer the window in tokens, None for full attention; empty means full attention everywhere.
        mixers: Per layer what stands in place of attention, None for attention; empty means attention everywhere.
        feed_forwards: Per layer what stands in place of the dense layer, None for that; empty means it everywhere.
        halves: Per layer which halves its block has; empty means both everywhere.
        head_dim: Default if config.json gives none; None means hidden_size / num_attention_heads.
        full_head_dim: That of layers without a window; None for the same everywhere.
        extension: What the decoder has beside its blocks; None for nothing.
        norm_offset: Added to the stored weights of norms over hidden states.
        embedding_scale: Multiplier of embeddings, in the model's dtype.
        residual_scale: Multiplier of what each half of a block adds.
        logit_scale: Multiplier of logits.
        attention_scale: Multiplier of scores; None means head_dim ** -0.5.
        attention_soft_cap, logit_soft_cap: Scores or logits become cap * tanh(x / cap); None means no cap.
        activation: Of the feed-forward layers; None means hidden_act of config.json, else SiLU.
        is_gated: Whether feed-forward layers have a gate.
        gate_is_last: Whether the checkpoint has it behind the other half, in one matrix.
        ties_embeddings: Default of tie_word_embeddings: the output head shares the matrix of the embedding.
        has_draft_heads: Whether num_nextn_predict_layers counts heads under DeepSeek's names, see `head_spec`.
    """

    names: TensorNames = TensorNames()
    defaults: Mapping[str, object] = field(default_factory=dict)
    sizes: Mapping[str, object] = field(default_factory=dict)
    encoder: "FamilySwitches | None" = None
    bias: DistanceBias | None = None
    sinusoid: Sinusoid | None = None
    hearing: Hearing | None = None
    num_unwritten_ids: int = 0
    logit_bias: str = ""
    norm: Norm = Norm.RMS
    norms: Norms = Norms.BEFORE
    has_final_norm: bool = True
    qkv_bias: bool = False
    key_bias: bool = True
    o_bias: bool | None = None
    mlp_bias: bool = False
    head_bias: bool = False
    qk_norm: QKNorm | None = None
    fused: Fused = Fused.STACKED
    is_transposed: bool = False
    is_interleaved: bool = False
    has_rope: bool = True
    ropeless: frozenset[int] = frozenset()
    local_rope_theta: float | None = None
    temperature: Temperature | None = None
    num_positions_skipped: int = 0
    counts_skipped: bool = False
    is_bidirectional: bool = False
    mutual: frozenset[int] = frozenset()
    classifier: Classifier | None = None
    normless: frozenset[int] = frozenset()
    unused: tuple[str, ...] = ()
    clip: float | None = None
    sinks: str = ""
    slopes: tuple[float, ...] = ()
    sliding_windows: tuple[int | None, ...] = ()
    mixers: tuple[MixerSwitches | None, ...] = ()
    feed_forwards: tuple[FeedForwardSwitches | None, ...] = ()
    halves: tuple[Halves, ...] = ()
    head_dim: int | None = None
    full_head_dim: int | None = None
    extension: DecoderSwitches | None = None
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    activation: str | None = None
    is_gated: bool = True
    gate_is_last: bool = False
    ties_embeddings: bool = False
    has_draft_heads: bool = False


Family = Callable[[Fields], FamilySwitches]

FAMILIES: dict[str, Family] = {}
"""By architecture; `registry` fills it."""


def family(*architectures: str) -> Callable[[Family], Family]:
    """Make a function the family of architectures, by their names in config.json."""

    def register(function: Family) -> Family:
        FAMILIES.update(dict.fromkeys(architectures, function))
        return function

    return register


@dataclass(frozen=True, slots=True)
class SizedFeedForward(FeedForwardSwitches):
    """The dense layer with a size that is computed from config.json."""

    intermediate_size: int

    @override
    def num_values(self, hidden_size: int) -> int:
        return self.intermediate_size
