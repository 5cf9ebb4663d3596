"""Models of an encoder and a decoder that reads it: T5, and BART with what descends from it.

T5 (Raffel et al., 2020) has RMSNorm, scores that are not scaled, and a learned bias by distance in the place of
positions. BART (Lewis et al., 2020) has LayerNorm, biases and an embedding of positions.
"""

from dataclasses import replace

from weft.engine.families.switches import (
    DistanceBias,
    FamilySwitches,
    Norm,
    Norms,
    Sinusoid,
    TensorNames,
    UseModule,
    family,
)
from weft.engine.fields import Fields

_T5_CONTEXT = 2048
"""Distances have no end, so that of the file, which is what it was trained with, is no limit."""


def _t5_names(half: str, feed_forward: int, is_gated: bool) -> TensorNames:
    last = f"layer.{feed_forward}"
    return TensorNames(
        embedding="shared",
        layers=f"{half}.block",
        norm=f"{half}.final_layer_norm",
        mixer_norm="layer.0.layer_norm",
        feed_forward_norm=f"{last}.layer_norm",
        qkv=tuple(f"layer.0.SelfAttention.{name}" for name in "qkv"),
        output="layer.0.SelfAttention.o",
        bias="layer.0.SelfAttention.relative_attention_bias",
        cross_norm="layer.1.layer_norm",
        cross_qkv=tuple(f"layer.1.EncDecAttention.{name}" for name in "qkv"),
        cross_output="layer.1.EncDecAttention.o",
        gate_up=tuple(f"{last}.DenseReluDense.{name}" for name in (("wi_0", "wi_1") if is_gated else ("wi",))),
        down=f"{last}.DenseReluDense.wo",
    )


@family("T5ForConditionalGeneration")
def t5(fields: Fields) -> FamilySwitches:
    """All layers share the bias of the first one."""
    return _t5(fields, form="relu", is_scaled=_scales_outputs(fields))


@family("MT5ForConditionalGeneration")
def mt5(fields: Fields) -> FamilySwitches:
    """T5 whose logits are never scaled."""
    return _t5(fields, form="gated-gelu", is_scaled=False)


@family("UMT5ForConditionalGeneration")
def umt5(fields: Fields) -> FamilySwitches:
    """T5 with a bias for each layer."""
    return _t5(fields, form="gated-gelu", is_scaled=_scales_outputs(fields), is_bias_shared=False)


def _scales_outputs(fields: Fields) -> bool:
    """Files of transformers 5 say so; before, those with a head of its own did not, and all of them are tied now."""
    return fields.flag("scale_decoder_outputs", fields.flag("tie_word_embeddings", True))


def _t5(fields: Fields, *, form: str, is_scaled: bool, is_bias_shared: bool = True) -> FamilySwitches:
    form = fields.optional_text("feed_forward_proj") or form
    is_gated, activation = form.startswith("gated-"), form.rpartition("-")[2]
    num_layers, size = fields.size("num_layers", 6), fields.size("d_model", 512)
    bias = DistanceBias(
        fields.size("relative_attention_num_buckets", 32),
        fields.size("relative_attention_max_distance", 128),
        is_bias_shared,
    )
    sizes = {
        "hidden_size": size,
        "head_dim": fields.size("d_kv", 64),
        "num_attention_heads": fields.size("num_heads", 8),
        "intermediate_size": fields.size("d_ff", 2048),
        "max_position_embeddings": _T5_CONTEXT,
        "rms_norm_eps": fields.number("layer_norm_epsilon", 1e-6),
        "tie_word_embeddings": True,
    }
    base = FamilySwitches(
        attention_scale=1.0,
        has_rope=False,
        bias=bias,
        is_gated=is_gated,
        activation="gelu_new" if form == "gated-gelu" else activation,
    )
    return replace(
        base,
        names=_t5_names("decoder", 2, is_gated),
        sizes=sizes | {"num_hidden_layers": fields.size("num_decoder_layers", num_layers)},
        logit_scale=size**-0.5 if is_scaled else 1.0,
        unused=(
            *("encoder.embed_tokens.", "decoder.embed_tokens."),
            "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.",
        ),
        encoder=replace(
            base,
            names=_t5_names("encoder", 1, is_gated),
            sizes=sizes | {"num_hidden_layers": num_layers},
            is_bidirectional=True,
        ),
    )


def _bart(fields: Fields, *, is_shared: bool = True, sinusoid: Sinusoid | None = None, **kind: bool) -> FamilySwitches:
    """Both halves; `kind` is that of `bart_half`."""
    halves = ("decoder", "encoder")
    decoder, encoder = (
        bart_half(fields, half, "model.shared" if is_shared else f"model.{half}.embed_tokens", sinusoid, **kind)
        for half in halves
    )
    parts = ["embed_tokens"] * is_shared + ["embed_positions"] * (sinusoid is not None)
    unused = tuple(f"model.{half}.{part}." for half in halves for part in parts)
    return replace(decoder, encoder=encoder, logit_bias="final_logits_bias", unused=unused)


def bart_half(
    fields: Fields,
    half: str,
    embedding: str,
    sinusoid: Sinusoid | None,
    *,
    is_after: bool,
    has_embedding_norm: bool = False,
    skips_two: bool = False,
) -> FamilySwitches:
    """Encoder or decoder.

    Args:
        is_after: Whether norms are behind the sums; if not, there is one behind the last layer.
        skips_two: Whether the first two rows of the embedding of positions are never used.
    """
    own, size = f"model.{half}", fields.size("d_model")
    names = TensorNames(
        embedding=embedding,
        layers=f"{own}.layers",
        norm=f"{own}.layer_norm",
        positions="" if sinusoid else f"{own}.embed_positions",
        embedding_norm=f"{own}.layernorm_embedding" if has_embedding_norm else "",
        mixer_norm="self_attn_layer_norm",
        mixer_post_norm="self_attn_layer_norm",
        feed_forward_norm="final_layer_norm",
        feed_forward_post_norm="final_layer_norm",
        output="self_attn.out_proj",
        cross_norm="encoder_attn_layer_norm",
        cross_qkv=tuple(f"encoder_attn.{name}_proj" for name in "qkv"),
        cross_output="encoder_attn.out_proj",
        gate_up=("fc1",),
        down="fc2",
    )
    return FamilySwitches(
        names=names,
        norm=Norm.LAYER_NORM,
        norms=Norms.OF_SUM if is_after else Norms.BEFORE,
        has_final_norm=not is_after,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        has_rope=False,
        is_gated=False,
        is_bidirectional=half == "encoder",
        activation=fields.optional_text("activation_function") or "gelu",
        num_positions_skipped=2 * skips_two,
        sinusoid=sinusoid,
        embedding_scale=size**0.5 if fields.flag("scale_embedding", False) else 1.0,
        sizes={
            "num_hidden_layers": fields.size(f"{half}_layers", 12),
            "num_attention_heads": fields.size(f"{half}_attention_heads", 16),
            "intermediate_size": fields.size(f"{half}_ffn_dim", 4096),
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-5,
        },
        defaults={"max_position_embeddings": 1024},
    )


@family("BartForConditionalGeneration", "PLBartForConditionalGeneration")
def bart(fields: Fields) -> FamilySwitches:
    """Norms behind the sums."""
    return _bart(fields, is_after=True, has_embedding_norm=True, skips_two=True)


@family("MBartForConditionalGeneration")
def mbart(fields: Fields) -> FamilySwitches:
    """BART with norms before the halves."""
    return _bart(fields, is_after=False, has_embedding_norm=True, skips_two=True)


@family("BlenderbotForConditionalGeneration")
def blenderbot(fields: Fields) -> FamilySwitches:
    """The same as mBART, without a norm of embeddings; every position has its row."""
    return _bart(fields, is_after=False)


@family("MarianMTModel")
def marian(fields: Fields) -> FamilySwitches:
    """BART with sines in the place of learned positions, and without a norm of embeddings."""
    if fields.integer("decoder_vocab_size", size := fields.size("vocab_size", 58_101)) != size:
        raise UseModule("vocabularies of two sizes are not supported")
    is_shared = fields.flag("share_encoder_decoder_embeddings", True)
    return _bart(fields, is_after=True, is_shared=is_shared, sinusoid=Sinusoid())


@family("PegasusForConditionalGeneration")
def pegasus(fields: Fields) -> FamilySwitches:
    """Marian with norms before the halves."""
    return _bart(fields, is_after=False, sinusoid=Sinusoid())


@family("M2M100ForConditionalGeneration")
def m2m_100(fields: Fields) -> FamilySwitches:
    """Pegasus with sines of fairseq, whose positions begin behind that of padding; NLLB is one."""
    sinusoid = Sinusoid(fields.integer("pad_token_id", 1) + 1, is_of_fairseq=True)
    return replace(_bart(fields, is_after=False, sinusoid=sinusoid), logit_bias="")
