"""Families with GPT-2's blocks: LayerNorm, and feed-forward layers without a gate.

These are GPT-2, GPTBigCode, OPT, BioGPT and StarCoder 2, and BLOOM and MPT, which have no embedding of positions: their
scores fall with the distance (ALiBi).
"""

from dataclasses import replace

from weft.engine.families.attention import bloom_slopes
from weft.engine.families.switches import BLOOM, GPT2, FamilySwitches, Fused, Norm, TensorNames, UseModule, family
from weft.engine.fields import Fields

_BASE = FamilySwitches(
    norm=Norm.LAYER_NORM,
    qkv_bias=True,
    mlp_bias=True,
    is_gated=False,
    has_rope=False,
    ties_embeddings=True,
    defaults={"rms_norm_eps": 1e-5},
)

_OPT = TensorNames(
    embedding="model.decoder.embed_tokens",
    layers="model.decoder.layers",
    norm="model.decoder.final_layer_norm",
    positions="model.decoder.embed_positions",
    mixer_norm="self_attn_layer_norm",
    feed_forward_norm="final_layer_norm",
    output="self_attn.out_proj",
    gate_up=("fc1",),
    down="fc2",
)


@family("GPT2LMHeadModel")
def gpt2(fields: Fields) -> FamilySwitches:
    """Learned positions; matrices are stored as (inputs, outputs)."""
    if fields.flag("scale_attn_by_inverse_layer_idx", False) or fields.flag("add_cross_attention", False):
        raise UseModule("scale_attn_by_inverse_layer_idx and add_cross_attention are not supported")
    return replace(
        _BASE,
        names=replace(GPT2, positions="transformer.wpe"),
        is_transposed=True,
        attention_scale=None if fields.flag("scale_attn_weights", True) else 1.0,
        defaults={
            "rms_norm_eps": 1e-5,
            "hidden_act": "gelu_new",
            "intermediate_size": 4 * fields.integer("hidden_size"),
        },
    )


@family("GPTBigCodeForCausalLM")
def gpt_bigcode(fields: Fields) -> FamilySwitches:
    """SantaCoder and StarCoder: all heads share one pair of keys and values."""
    is_multi_query = fields.flag("multi_query", True)
    num_kv_heads = 1 if is_multi_query else fields.integer("num_attention_heads")
    base = gpt2(fields)
    return replace(
        base,
        is_transposed=False,
        fused=Fused.STACKED if is_multi_query else Fused.HEADS,
        defaults={**base.defaults, "hidden_act": "gelu_pytorch_tanh", "num_key_value_heads": num_kv_heads},
    )


@family("OPTForCausalLM")
def opt(fields: Fields) -> FamilySwitches:
    """The first two rows of the embedding of positions are never used."""
    size = fields.integer("hidden_size")
    if fields.integer("word_embed_proj_dim", size) != size or not fields.flag("do_layer_norm_before", True):
        raise UseModule("embeddings of another size and norms behind each half are not supported")
    if not fields.flag("layer_norm_elementwise_affine", True) or fields.flag("_remove_final_layer_norm", False):
        raise UseModule("norms without weights are not supported")
    has_bias = fields.flag("enable_bias", True)
    return replace(
        _BASE,
        names=_OPT,
        qkv_bias=has_bias,
        mlp_bias=has_bias,
        num_positions_skipped=2,
        defaults={"rms_norm_eps": 1e-5, "hidden_act": "relu"},
    )


@family("BioGptForCausalLM")
def biogpt(fields: Fields) -> FamilySwitches:
    """OPT's layers; embeddings are scaled."""
    size = fields.integer("hidden_size")
    return replace(
        _BASE,
        names=replace(
            _OPT,
            embedding="biogpt.embed_tokens",
            layers="biogpt.layers",
            norm="biogpt.layer_norm",
            positions="biogpt.embed_positions",
            head="output_projection",
        ),
        num_positions_skipped=2,
        embedding_scale=size**0.5 if fields.flag("scale_embedding", True) else 1.0,
        defaults={"rms_norm_eps": 1e-12, "hidden_act": "gelu"},
    )


@family("Starcoder2ForCausalLM")
def starcoder2(fields: Fields) -> FamilySwitches:
    """Llama's attention with biases."""
    has_bias = fields.flag("use_bias", True)
    return replace(
        _BASE,
        names=TensorNames(gate_up=("mlp.c_fc",), down="mlp.c_proj"),
        qkv_bias=has_bias,
        mlp_bias=has_bias,
        has_rope=True,
        sliding_windows=(fields.optional_integer("sliding_window"),) * fields.integer("num_hidden_layers"),
        defaults={"num_key_value_heads": 2, "rms_norm_eps": 1e-5, "hidden_act": "gelu_pytorch_tanh"},
    )


@family("BloomForCausalLM")
def bloom(fields: Fields) -> FamilySwitches:
    """Scores that fall with the distance (ALiBi); LayerNorm, also of the embeddings; biases everywhere."""
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
        slopes=bloom_slopes(fields.size("num_attention_heads", 8)),
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
    """ALiBi, no biases at all.

    Neither alibi nor expansion_ratio is read, as in transformers, which ignores alibi_bias_max.
    """
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


def _mpt_slopes(num_heads: int, largest: int) -> tuple[float, ...]:
    """2 ** (-largest i / n) for the next power of two n; of too many, every second one comes first."""
    whole = 1 << (num_heads - 1).bit_length()
    slopes = [2.0 ** (-largest * index / whole) for index in range(1, whole + 1)]
    return tuple(slopes if whole == num_heads else (slopes[1::2] + slopes[::2])[:num_heads])
