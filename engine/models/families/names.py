"""The names that a family's checkpoints give to their tensors; the defaults are Llama's."""

from dataclasses import dataclass


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


LLAMA = TensorNames()
BLOOM = TensorNames(
    embedding="transformer.word_embeddings",
    layers="transformer.h",
    norm="transformer.ln_f",
    qkv=("self_attention.query_key_value",),
    output="self_attention.dense",
    gate_up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
)
GEMMA2 = TensorNames(feed_forward_norm="pre_feedforward_layernorm")
"""Norms on both sides of both halves."""
