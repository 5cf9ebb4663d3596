"""Models that write down speech: an encoder that hears, and a decoder that reads it.

Whisper: Radford et al., 2022. Moonshine: Jeffries et al., 2024. Speech2Text: Wang et al., "fairseq S2T", 2020.
"""

from dataclasses import replace

from weft.engine.families.encoder_decoder import bart_half
from weft.engine.families.switches import (
    Convolution,
    FamilySwitches,
    Hearing,
    Norm,
    Sinusoid,
    TensorNames,
    UseModule,
    family,
)
from weft.engine.fields import Fields
from weft.engine.wire.inputs import AudioShape

_RATE = 16_000
_HOP = _RATE // 100
_MOONSHINE_SECONDS = 30
"""Its positions have no end; it was trained with at most so much."""


def _steps(convolutions: tuple[Convolution, ...]) -> tuple[tuple[int, int, int], ...]:
    return tuple((step.size, step.stride, step.padding) for step in convolutions)


def _half(fields: Fields, half: str, sinusoid: Sinusoid | None = None, **changes: object) -> FamilySwitches:
    base = bart_half(fields, half, "model.decoder.embed_tokens", sinusoid, is_after=False)
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
    encoder = replace(encoder, sizes={**encoder.sizes, **positions}, activation=_activation(fields, "relu"))
    decoder = _half(fields, "decoder", sinusoid, encoder=encoder, embedding_scale=scale)
    unused = "model.encoder.embed_positions.", "model.decoder.embed_positions.", "lm_head."
    return replace(decoder, activation=_activation(fields, "relu"), unused=unused)


def _activation(fields: Fields, usual: str) -> str:
    return fields.optional_text("activation_function") or usual


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
