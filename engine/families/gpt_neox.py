"""GPT-NeoX and families that share one of its marks: heads rotated in part, or the halves of a block side by side.

GPT-NeoX, GPT-J, Phi-1 to Phi-2, Persimmon, StableLM, Nemotron and Falcon have LayerNorm. Cohere's Command has it
without bias, and GLM-4 has RMSNorm.
"""

import math
from dataclasses import replace

from weft.engine.families import switches
from weft.engine.families.attention import bloom_slopes, read_window, windowless, windows_by_pattern
from weft.engine.families.switches import FamilySwitches, Fused, Norm, Norms, QKNorm, TensorNames, family
from weft.engine.fields import Fields

_DENSE = TensorNames(output="self_attn.dense")

_BASE = FamilySwitches(
    norm=Norm.LAYER_NORM,
    norms=Norms.PARALLEL,
    qkv_bias=True,
    mlp_bias=True,
    is_gated=False,
    defaults={"rms_norm_eps": 1e-5},
)


@family("GPTNeoXForCausalLM")
def gpt_neox(fields: Fields) -> FamilySwitches:
    """Pythia too: each half has a norm, also where they stand side by side."""
    return replace(
        _BASE,
        names=TensorNames(
            embedding="gpt_neox.embed_in",
            layers="gpt_neox.layers",
            norm="gpt_neox.final_layer_norm",
            head="embed_out",
            qkv=("attention.query_key_value",),
            output="attention.dense",
            gate_up=("mlp.dense_h_to_4h",),
            down="mlp.dense_4h_to_h",
        ),
        norms=Norms.PARALLEL if fields.flag("use_parallel_residual", True) else Norms.BEFORE,
        qkv_bias=fields.flag("attention_bias", True),
        fused=Fused.HEADS,
        defaults={"rms_norm_eps": 1e-5, "hidden_act": "gelu", "partial_rotary_factor": 0.25},
    )


@family("GPTJForCausalLM")
def gptj(fields: Fields) -> FamilySwitches:
    """Neighbours are rotated; biases only in feed-forward layers and in the output head."""
    return replace(
        _BASE,
        names=replace(
            switches.GPT2,
            feed_forward_norm="",
            qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
            output="attn.out_proj",
            gate_up=("mlp.fc_in",),
            down="mlp.fc_out",
        ),
        qkv_bias=False,
        head_bias=True,
        is_interleaved=True,
        defaults={
            "rms_norm_eps": 1e-5,
            "hidden_act": "gelu_new",
            "rotary_dim": 64,
            "intermediate_size": 4 * fields.integer("hidden_size"),
        },
    )


@family("PhiForCausalLM")
def phi(fields: Fields) -> FamilySwitches:
    """Phi-1 to Phi-2: biases everywhere."""
    if fields.flag("qk_layernorm", False):
        raise switches.UseModule("qk_layernorm is not supported")
    return replace(
        _BASE,
        names=replace(_DENSE, norm="model.final_layernorm", feed_forward_norm="", gate_up=("mlp.fc1",), down="mlp.fc2"),
        head_bias=True,
        defaults={"rms_norm_eps": 1e-5, "hidden_act": "gelu_new", "partial_rotary_factor": 0.5},
    )


@family("PersimmonForCausalLM")
def persimmon(fields: Fields) -> FamilySwitches:
    """One half after the other; queries and keys have a LayerNorm."""
    return replace(
        _BASE,
        names=replace(
            _DENSE,
            norm="model.final_layernorm",
            qkv=("self_attn.query_key_value",),
            query_norm="self_attn.q_layernorm",
            key_norm="self_attn.k_layernorm",
            gate_up=("mlp.dense_h_to_4h",),
            down="mlp.dense_4h_to_h",
        ),
        norms=Norms.BEFORE,
        qk_norm=QKNorm(Norm.LAYER_NORM) if fields.flag("qk_layernorm", True) else None,
        fused=Fused.HEADS,
        defaults={"rms_norm_eps": 1e-5, "hidden_act": "relu2", "partial_rotary_factor": 0.5},
    )


@family("StableLmForCausalLM")
def stablelm(fields: Fields) -> FamilySwitches:
    """Feed-forward layers with a gate."""
    if fields.flag("qk_layernorm", False):
        raise switches.UseModule("qk_layernorm is not supported")
    is_parallel = fields.flag("use_parallel_residual", False)
    return replace(
        _BASE,
        names=TensorNames(feed_forward_norm="" if is_parallel else TensorNames().feed_forward_norm),
        norms=Norms.PARALLEL if is_parallel else Norms.BEFORE,
        qkv_bias=fields.flag("use_qkv_bias", False),
        o_bias=False,
        mlp_bias=False,
        is_gated=True,
        defaults={"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.25},
    )


@family("NemotronForCausalLM")
def nemotron(fields: Fields) -> FamilySwitches:
    """Nemotron 3 and Minitron: the weights of norms are stored minus 1."""
    return replace(
        _BASE,
        names=TensorNames(gate_up=("mlp.up_proj",)),
        norms=Norms.BEFORE,
        norm_offset=1.0,
        qkv_bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
        defaults={"rms_norm_eps": 1e-5, "hidden_act": "relu2", "partial_rotary_factor": 0.5},
    )


@family("FalconForCausalLM")
def falcon(fields: Fields) -> FamilySwitches:
    """Falcon 7B (one head of keys and values), 40B (groups, a norm for each half), and RW, which has ALiBi.

    RW adds its biases before it scales the scores, and rounds slopes to bfloat16 at any dtype.
    """
    num_heads, size = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    is_new = fields.flag("new_decoder_architecture", False)
    num_norms = fields.integer("num_ln_in_parallel_attn", 2) if is_new else 1
    is_parallel = is_new or fields.flag("parallel_attn", True)
    is_multi_query = fields.flag("multi_query", True)
    num_kv_heads = fields.integer("num_kv_heads", num_heads) if is_new else 1 if is_multi_query else num_heads
    has_bias = fields.flag("bias", False)
    has_alibi = fields.flag("alibi", False)
    scale = (size // num_heads) ** -0.5
    two = is_new and num_norms == 2
    return replace(
        _BASE,
        names=replace(
            switches.BLOOM,
            mixer_norm="ln_attn" if two else "input_layernorm",
            feed_forward_norm="ln_mlp" if two else "" if is_parallel else "post_attention_layernorm",
        ),
        norms=Norms.PARALLEL if is_parallel else Norms.BEFORE,
        fused=Fused.GROUPS if is_new else Fused.STACKED if is_multi_query else Fused.HEADS,
        qkv_bias=has_bias,
        mlp_bias=has_bias,
        has_rope=not has_alibi,
        slopes=tuple(scale * _as_bfloat16(slope) for slope in bloom_slopes(num_heads)) if has_alibi else (),
        ties_embeddings=True,
        activation=fields.optional_text("activation") or "gelu",
        defaults={
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": num_kv_heads,
            "intermediate_size": fields.integer("ffn_hidden_size", 4 * size),
            "max_position_embeddings": 2048,
        },
    )


def _as_bfloat16(value: float) -> float:
    fraction, exponent = math.frexp(value)
    return math.ldexp(round(fraction * 256), exponent - 8)


@family("CohereForCausalLM")
def cohere(fields: Fields) -> FamilySwitches:
    """Command R: both halves share a LayerNorm without bias; in Command R+ every head has a norm of its own."""
    head_norm = QKNorm(Norm.LAYER_NORM_WITHOUT_BIAS, per_head=True)
    return FamilySwitches(
        names=TensorNames(feed_forward_norm=""),
        norm=Norm.LAYER_NORM_WITHOUT_BIAS,
        norms=Norms.PARALLEL,
        qkv_bias=fields.flag("attention_bias", False),
        qk_norm=head_norm if fields.flag("use_qk_norm", False) else None,
        is_interleaved=True,
        logit_scale=fields.number("logit_scale", 0.0625),
        ties_embeddings=True,
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 5e5},
    )


@family("Cohere2ForCausalLM")
def cohere2(fields: Fields) -> FamilySwitches:
    """Command R7B and A: windows; layers with full attention have no rotary embedding."""
    windows = windows_by_pattern(fields, read_window(fields, 4096), 4)
    return replace(
        cohere(fields),
        qk_norm=None,
        sliding_windows=windows,
        ropeless=windowless(windows),
        defaults={"rms_norm_eps": 1e-5},
    )


_GLM = TensorNames(gate_up=("mlp.gate_up_proj",))


@family("GlmForCausalLM")
def glm(fields: Fields) -> FamilySwitches:
    """GLM-4: half of each head is rotated, in neighbours; gate and up projection are one matrix."""
    return FamilySwitches(
        names=_GLM,
        qkv_bias=fields.flag("attention_bias", True),
        o_bias=False,
        is_interleaved=True,
        head_dim=128,
        defaults={"num_key_value_heads": 2, "partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-7},
    )


@family("Glm4ForCausalLM")
def glm4(fields: Fields) -> FamilySwitches:
    """GLM-4-0414: as before, with norms on both sides of both halves."""
    names = replace(_GLM, mixer_post_norm="post_self_attn_layernorm", feed_forward_post_norm="post_mlp_layernorm")
    return replace(glm(fields), names=names, norms=Norms.AROUND)
