"""Models of an encoder and a decoder that reads it: T5, BART with what descends from it, and T5Gemma.

T5 (Raffel et al., 2020) has RMSNorm, scores that are not scaled, and a learned bias by distance in the place of
positions. BART (Lewis et al., 2020) has LayerNorm, biases and an embedding of positions.

Some encoders hear: Whisper's (Radford et al., 2022), Moonshine's (Jeffries et al., 2024), Speech2Text's (Wang et al.,
2020).
"""

from dataclasses import replace

from weft.engine.families.gemma import gemma2
from weft.engine.families.switches import (
    Convolution,
    DistanceBias,
    FamilySwitches,
    Hearing,
    Norm,
    Norms,
    Sinusoid,
    TensorNames,
    UseModule,
    family,
)
from weft.engine.fields import Fields
from weft.engine.wire.inputs import AudioShape

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
    """Both halves; `kind` is that of `_bart_half`."""
    halves = ("decoder", "encoder")
    decoder, encoder = (
        _bart_half(fields, half, "model.shared" if is_shared else f"model.{half}.embed_tokens", sinusoid, **kind)
        for half in halves
    )
    parts = ["embed_tokens"] * is_shared + ["embed_positions"] * (sinusoid is not None)
    unused = tuple(f"model.{half}.{part}." for half in halves for part in parts)
    return replace(decoder, encoder=encoder, logit_bias="final_logits_bias", unused=unused)


def _bart_half(
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


@family("T5GemmaForConditionalGeneration")
def t5gemma(fields: Fields) -> FamilySwitches:
    """Gemma 2 in both halves (Zhang et al., 2025), each with sizes of its own; the encoder's windows are one wider."""
    decoder, encoder = (_t5gemma_half(fields, half) for half in ("decoder", "encoder"))
    if decoder.sizes["vocab_size"] != encoder.sizes["vocab_size"]:
        raise UseModule("vocabularies of two sizes are not supported")
    windows = tuple(window and window + 1 for window in encoder.sliding_windows)
    return replace(decoder, encoder=replace(encoder, is_bidirectional=True, sliding_windows=windows))


def _t5gemma_half(fields: Fields, half: str) -> FamilySwitches:
    own, section = f"model.{half}", fields.section(half)
    names = TensorNames(
        embedding=f"{own}.embed_tokens",
        layers=f"{own}.layers",
        norm=f"{own}.norm",
        head="lm_head.out_proj",
        mixer_norm="pre_self_attn_layernorm",
        mixer_post_norm="post_self_attn_layernorm",
        feed_forward_norm="pre_feedforward_layernorm",
        cross_norm="pre_cross_attn_layernorm",
        cross_post_norm="post_cross_attn_layernorm",
        cross_qkv=tuple(f"cross_attn.{name}_proj" for name in "qkv"),
        cross_output="cross_attn.o_proj",
    )
    sizes = {name: section.raw(name) for name in section.names()}
    sizes |= {name: fields.raw(name) for name in ("dtype", "tie_word_embeddings") if fields.has(name)}
    return replace(gemma2(section), names=names, sizes=sizes)


_RATE = 16_000
_HOP = _RATE // 100
_MOONSHINE_SECONDS = 30
"""Its positions have no end; it was trained with at most so much."""


def _steps(convolutions: tuple[Convolution, ...]) -> tuple[tuple[int, int, int], ...]:
    return tuple((step.size, step.stride, step.padding) for step in convolutions)


def _half(fields: Fields, half: str, sinusoid: Sinusoid | None = None, **changes: object) -> FamilySwitches:
    base = _bart_half(fields, half, "model.decoder.embed_tokens", sinusoid, is_after=False)
    num_positions = fields.size("max_source_positions" if half == "encoder" else "max_target_positions")
    return replace(base, sizes={**base.sizes, "max_position_embeddings": num_positions}, **changes)  # type: ignore[arg-type]


@family("WhisperForConditionalGeneration")
def whisper(fields: Fields) -> FamilySwitches:
    """BART with norms before the halves, keys without a bias, and inputs that are all of one length."""
    size, num_positions = fields.size("d_model"), fields.size("max_source_positions", 1500)
    convolutions = (
        Convolution("model.encoder.conv1", fields.size("num_mel_bins", 80), size, 3, 1, 1),
        Convolution("model.encoder.conv2", size, size, 3, 2, 1),
    )
    frames = _HOP, _HOP, 0
    shape = AudioShape(_RATE, 2 * num_positions * _HOP, (frames, *_steps(convolutions)), is_padded=True)
    hearing = Hearing("WhisperFeatureExtractor", shape, convolutions)
    encoder = _half(fields, "encoder", key_bias=False, hearing=hearing, embedding_scale=1.0)
    decoder = _half(fields, "decoder", key_bias=False, encoder=encoder, embedding_scale=1.0)
    return replace(decoder, unused=("proj_out.",))


@family("Speech2TextForConditionalGeneration")
def speech_to_text(fields: Fields) -> FamilySwitches:
    """Pegasus that reads features of sound."""
    size, inner = fields.size("d_model", 256), fields.size("conv_channels", 1024)
    num_inputs = fields.size("input_feat_per_channel", 80) * fields.size("input_channels", 1)
    sizes = [*fields.integers("conv_kernel_sizes")] or [5, 5]
    convolutions = tuple(
        Convolution(
            f"model.encoder.conv.conv_layers.{index}",
            inner // 2 if index else num_inputs,
            inner if index < len(sizes) - 1 else 2 * size,
            kernel,
            2,
            kernel // 2,
            activation="glu",
        )
        for index, kernel in enumerate(sizes)
    )
    frame = 5 * _HOP // 2
    max_samples = frame + _HOP * (fields.size("max_source_positions", 6000) - 1)
    shape = AudioShape(_RATE, max_samples, ((frame, _HOP, 0), *_steps(convolutions)), is_padded=False)
    scale = size**0.5 if fields.flag("scale_embedding", True) else 1.0
    hearing = Hearing("Speech2TextFeatureExtractor", shape, convolutions, scale)
    sinusoid = Sinusoid(fields.integer("pad_token_id", 1) + 1, is_of_fairseq=True)
    encoder = _half(fields, "encoder", sinusoid, hearing=hearing)
    positions = {"max_position_embeddings": shape.num_positions(max_samples)}
    activation = fields.optional_text("activation_function") or "relu"
    encoder = replace(encoder, sizes={**encoder.sizes, **positions}, activation=activation)
    decoder = _half(fields, "decoder", sinusoid, encoder=encoder, embedding_scale=scale, activation=activation)
    return replace(decoder, unused=("model.encoder.embed_positions.", "model.decoder.embed_positions."))


@family("MoonshineForConditionalGeneration")
def moonshine(fields: Fields) -> FamilySwitches:
    """Rotary embeddings in both halves, gates in the decoder alone, and convolutions in the place of features."""
    size = fields.size("hidden_size", 288)
    convolutions = (
        Convolution(
            "model.encoder.conv1", 1, size, 127, 64, has_bias=False, activation="tanh", norm="model.encoder.groupnorm"
        ),
        Convolution("model.encoder.conv2", size, 2 * size, 7, 3),
        Convolution("model.encoder.conv3", 2 * size, size, 3, 2),
    )
    shape = AudioShape(_RATE, _MOONSHINE_SECONDS * _RATE, _steps(convolutions), is_padded=False)
    hearing = Hearing("Wav2Vec2FeatureExtractor", shape, convolutions)
    encoder = _moonshine_half(fields, "encoder", hearing=hearing, is_bidirectional=True, is_gated=False)
    positions = {"max_position_embeddings": shape.num_positions(shape.max_samples)}
    encoder = replace(encoder, sizes={**encoder.sizes, **positions})
    return _moonshine_half(fields, "decoder", encoder=encoder, gate_is_last=True, unused=("proj_out.",))


def _moonshine_half(fields: Fields, half: str, **changes: object) -> FamilySwitches:
    own = f"model.{half}"
    names = TensorNames(
        embedding="model.decoder.embed_tokens",
        layers=f"{own}.layers",
        norm=f"{own}.layer_norm" if half == "encoder" else f"{own}.norm",
        feed_forward_norm="post_attention_layernorm" if half == "encoder" else "final_layernorm",
        cross_norm="post_attention_layernorm",
        cross_qkv=tuple(f"encoder_attn.{name}_proj" for name in "qkv"),
        cross_output="encoder_attn.o_proj",
        gate_up=("mlp.fc1",),
        down="mlp.fc2",
    )
    num_heads = fields.size(f"{half}_num_attention_heads", 8)
    if fields.optional_integer(f"{half}_num_key_value_heads") not in (None, num_heads):
        raise UseModule("moonshine with fewer key-value heads than heads is not supported")
    base = FamilySwitches(
        names=names,
        norm=Norm.LAYER_NORM_WITHOUT_BIAS,
        qkv_bias=fields.flag("attention_bias", False),
        o_bias=False,
        mlp_bias=True,
        is_interleaved=True,
        activation=fields.optional_text(f"{half}_hidden_act") or ("gelu" if half == "encoder" else "silu"),
        sizes={
            "num_hidden_layers": fields.size(f"{half}_num_hidden_layers", 6),
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_heads,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-5,
        },
        defaults={"max_position_embeddings": 512, "partial_rotary_factor": 0.9},
    )
    return replace(base, **changes)  # type: ignore[arg-type]
