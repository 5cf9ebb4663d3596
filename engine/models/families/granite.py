"""Granite 3 and HyperCLOVA X: Llama's layers with multipliers of embeddings, residuals, scores and logits."""

from dataclasses import replace

from weft.engine.fields import Fields
from weft.engine.layers.routing import TopK
from weft.engine.models.families.experts import ExpertNames, ExpertSwitches, on_layers
from weft.engine.models.families.family import FamilySwitches, Norms, family
from weft.engine.models.families.llama import llama
from weft.engine.models.families.names import LLAMA

EXPERTS = ExpertNames(
    router="block_sparse_moe.router.layer",
    gate_up=("block_sparse_moe.input_linear",),
    down="block_sparse_moe.output_linear",
    shared_gate_up=("shared_mlp.input_linear",),
    shared_down="shared_mlp.output_linear",
)


@family("GraniteForCausalLM")
def granite(fields: Fields) -> FamilySwitches:
    """Logits are divided by logits_scaling."""
    return replace(
        llama(fields),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        attention_scale=fields.number("attention_multiplier", 1.0),
        logit_scale=1.0 / fields.number("logits_scaling", 1.0),
    )


@family("HyperCLOVAXForCausalLM")
def hyperclovax(fields: Fields) -> FamilySwitches:
    """Logits are multiplied by logits_scaling, and each half may end with a norm."""
    head_dim = fields.integer("head_dim", fields.integer("hidden_size") // fields.integer("num_attention_heads"))
    names = replace(LLAMA, mixer_post_norm="post_norm1", feed_forward_post_norm="post_norm2")
    return replace(
        granite(fields),
        names=names,
        norms=Norms.AROUND if fields.flag("use_post_norm", True) else Norms.BEFORE,
        attention_scale=fields.number("attention_multiplier", head_dim**-0.5),
        logit_scale=fields.number("logits_scaling", 1.0),
    )


@family("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM")
def granitemoe(fields: Fields) -> FamilySwitches:
    """Experts, all in one tensor, whose shares are the softmax of the chosen; one may be for all tokens."""
    experts = ExpertSwitches(
        num_experts=fields.integer("num_local_experts", 8),
        size=fields.integer("intermediate_size"),
        routing=TopK(fields.integer("num_experts_per_tok", 2), scores=None, shares="softmax"),
        names=EXPERTS,
        shared_size=fields.integer("shared_intermediate_size", 0),
    )
    return replace(
        granite(fields),
        attention_scale=fields.number("attention_multiplier", 1.0),
        mlp_bias=False,
        feed_forwards=on_layers(fields, experts),
    )
