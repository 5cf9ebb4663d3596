"""Families without an embedding of positions, whose scores fall with the distance (ALiBi): BLOOM and MPT."""

from dataclasses import replace

from weft.engine.fields import Fields
from weft.engine.models.families.family import FamilySwitches, Fused, Norm, UseModule, family
from weft.engine.models.families.names import BLOOM, TensorNames


@family("BloomForCausalLM")
def bloom(fields: Fields) -> FamilySwitches:
    """LayerNorm, also of the embeddings; biases everywhere."""
    if fields.flag("apply_residual_connection_post_layernorm", False):
        raise UseModule("apply_residual_connection_post_layernorm is not supported")
    size = fields.integer("hidden_size", fields.integer("n_embed", 64))
    return FamilySwitches(
        names=replace(BLOOM, embedding_norm="transformer.word_embeddings_layernorm"),
        norm=Norm.LAYER_NORM,
        qkv_bias=True,
        mlp_bias=True,
        fused=Fused.HEADS,
        has_rope=False,
        slopes=_bloom_slopes(fields.size("num_attention_heads", 8)),
        activation="gelu_new",
        is_gated=False,
        ties_embeddings=True,
        defaults={
            "rms_norm_eps": 1e-5,
            "hidden_size": size,
            "intermediate_size": 4 * size,
            "max_position_embeddings": fields.integer("seq_length", 2048),
        },
    )


@family("MptForCausalLM")
def mpt(fields: Fields) -> FamilySwitches:
    """No biases at all. Neither alibi nor expansion_ratio is read, as in transformers, which ignores alibi_bias_max."""
    attention = fields.section("attn_config")
    return FamilySwitches(
        names=TensorNames(
            embedding="transformer.wte",
            layers="transformer.blocks",
            norm="transformer.norm_f",
            mixer_norm="norm_1",
            feed_forward_norm="norm_2",
            qkv=("attn.Wqkv",),
            output="attn.out_proj",
            gate_up=("ffn.up_proj",),
            down="ffn.down_proj",
        ),
        norm=Norm.LAYER_NORM_WITHOUT_BIAS,
        has_rope=False,
        slopes=_mpt_slopes(fields.size("num_attention_heads", 16), attention.integer("alibi_bias_max", 8)),
        clip=attention.optional_number("clip_qkv") or None,
        attention_scale=attention.optional_number("softmax_scale"),
        activation="gelu",
        is_gated=False,
        ties_embeddings=True,
        defaults={
            "rms_norm_eps": 1e-5,
            "intermediate_size": 4 * fields.integer("hidden_size"),
            "max_position_embeddings": 2048,
        },
    )


def _bloom_slopes(num_heads: int) -> tuple[float, ...]:
    """2 ** (-8 i / n) for the largest power of two n; further heads get every second slope of 2 n heads."""
    whole = 1 << (num_heads.bit_length() - 1)
    firsts = [2.0 ** (-8 * index / whole) for index in range(1, whole + 1)]
    return (*firsts, *(2.0 ** (-4 * index / whole) for index in range(1, 2 * (num_heads - whole), 2)))


def _mpt_slopes(num_heads: int, largest: int) -> tuple[float, ...]:
    """2 ** (-largest i / n) for the next power of two n; of too many, every second one comes first."""
    whole = 1 << (num_heads - 1).bit_length()
    slopes = [2.0 ** (-largest * index / whole) for index in range(1, whole + 1)]
    return tuple(slopes if whole == num_heads else (slopes[1::2] + slopes[::2])[:num_heads])
