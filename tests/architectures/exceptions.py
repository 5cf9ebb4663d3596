"""What the generic rules of `tests/architectures/shrink.py` cannot know about an architecture.

`CHANGES` corrects single fields, each for the reason beside it. `NO_DECODERS` and `NEVER_BUILT` name what no checkpoint
is written of.
"""

from collections.abc import Mapping
from typing import Any

_FREE_HEADS = {"head_dim": 16}  # the default is None, which the class itself cannot compute with
_SHARES_KEYS = {  # the last layer of each kind keeps the keys and values that the layers after it read
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
}
_GEMMA4 = _SHARES_KEYS | {"per_layer_config": {layer: {"head_dim": 32} for layer in ("1", "3")}}
_LLAMA4 = {  # moe_layers lists layers, not kinds; one chunked and one full layer, one dense and one of experts
    "num_hidden_layers": 4,
    "moe_layers": [1, 3],
    "no_rope_layers": [1, 1, 1, 0],
    "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
    "floor_scale": 16,  # so that attention temperatures differ within a prompt
}
_QWEN4 = {  # None means layers without an indexer, which their layer type asks for
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
    "hc_lowrank": 8,
}
_DOTS3 = {"head_dim": 24}  # must be qk_nope_head_dim + qk_rope_head_dim

CHANGES: Mapping[str, Mapping[str, Any]] = {
    "bamba": {"attn_layer_indices": [1], "mamba_d_head": 16},  # by default no layer has attention
    "cohere_compass_text": {  # read for each kind of layer, which the default leaves out
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}},
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0}},  # rope_theta has no default
    "deepseek_v2": {"num_experts_per_tok": 2},  # None by default
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}},  # not 128
    "dory": {  # as published: attention and feed-forward layers are counted apart
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "mlp", "full_attention", "mlp", "sliding_attention", "mlp"],
        "n_input_layers": 2,
        "n_recurrent_layers": 2,
        "n_output_layers": 2,
    },
    "dots1": {  # all counts of experts are None by default
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    },
    "dots3_note": {
        "text_config": _DOTS3,
        "vision_config": {"adapter_in_dim": 64, "adapter_out_dim": 64},
        "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64},
    },
    "dots3_note_text": _DOTS3,
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_d_head": 16},  # must be heads times their size
    "gemma3n_text": _SHARES_KEYS | {"activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0], "intermediate_size": 96},
    "gemma4": {"text_config": _GEMMA4},
    "gemma4_text": _GEMMA4,
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "mamba_d_head": 16},
    "hunyuan_v1_dense": _FREE_HEADS,
    "hunyuan_v1_moe": _FREE_HEADS,
    "inkling2_text": {"log_scaling_n_floor": 16},  # so that attention temperatures differ within a prompt
    "jamba": {"num_hidden_layers": 3, "attn_layer_period": 4, "attn_layer_offset": 2},  # layers follow from periods
    "lfm2": {
        "num_hidden_layers": 2,
        "layer_types": ["conv", "full_attention"],
        "block_multiple_of": 32,
    },  # by default all have attention
    "lfm2_moe": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},  # None by default
    "llama4": {"text_config": _LLAMA4},
    "llama4_text": _LLAMA4,
    "longcat_flash": {"zero_expert_num": 4, "head_dim": 8},  # keys are rotated in heads of qk_rope_head_dim
    "mamba2": {"num_heads": 8},  # times head_dim must be the width of the state
    "minimax": {"block_size": 16},  # of the linear attention; prompts shall be longer
    "minimax_m3_vl_text": {  # as published; by default all its layers see everything
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "index_block_size": 8,
        "index_topk_blocks": 2,
    },
    "ministral": _FREE_HEADS,
    "ministral3": {  # so that attention temperatures differ within a prompt
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.5,
        },
    },
    "mllama": {
        "text_config": {"num_hidden_layers": 3, "cross_attention_layers": [1]}
    },  # a list of layers, not of kinds
    "moshi": {"sliding_window": 256},  # the cache of transformers heeds the window, its mask does not
    "nemotron": _FREE_HEADS | {"num_key_value_heads": 2},
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "recurrent_gemma": {"num_hidden_layers": 3},  # the pattern of its layers repeats after three
    "xlstm": {"qk_dim_factor": 1.0},
    "zamba": {  # one layer's attention is shared by the others, so there have to be two
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
    },
    "zamba2": {
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "attention_hidden_size": 128,
    },
}

_ENCODERS = (
    "bert big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta roberta-prelayernorm roc_bert "
    "roformer xlm xlm-roberta xlm-roberta-xl xmod"
)
_HALVES = (
    "bart bert-generation bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart prophetnet trocr "
    "whisper"
)

NO_DECODERS: Mapping[str, str] = {
    **dict.fromkeys(_ENCODERS.split(), "an encoder, which sees what follows a token"),
    **dict.fromkeys(_HALVES.split(), "the decoder half of an encoder-decoder"),
    **dict.fromkeys(("cpmant", "xlnet"), "reads its prompt both ways, as an encoder does"),
    **dict.fromkeys(("musicgen", "musicgen_melody"), "an audio model, whose tokens are several codes at once"),
    **dict.fromkeys(
        ("gemma4_assistant", "gemma4_unified_assistant"),
        "a draft head, which reads the keys and values of the model that it drafts for",
    ),
}
"""Model types that no checkpoint of a text generator has, and why."""

NEVER_BUILT: Mapping[str, str] = {
    **dict.fromkeys(["blt", "reformer"], "transformers answers otherwise with its cache than without"),
    "gemma3n": "its vision tower needs timm; its text half is served, as gemma3n_text",
}
"""Model types that transformers cannot build, or not generate with, and why."""

SEEDS: Mapping[str, int] = {"biogpt": 4, "ctrl": 3, "opt": 1, "zaya": 1}
"""Of model types that answer nearly everything alike with seed 0."""

QUIET_VECTORS: Mapping[str, float] = {"zaya": 0.05}
"""Noise of the vectors of a model type. Zaya adds biases to its residuals; if they are large, they decide alone."""
