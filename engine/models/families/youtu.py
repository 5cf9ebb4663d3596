"""Youtu: a dense model with latent attention."""

from weft.engine.fields import Fields
from weft.engine.models.families.family import FamilySwitches, family
from weft.engine.models.families.latent import read_latent


@family("YoutuForCausalLM")
def youtu(fields: Fields) -> FamilySwitches:
    """The rotary embedding is that of the rotary part of heads."""
    latent = read_latent(fields)
    num_layers = fields.integer("num_hidden_layers")
    return FamilySwitches(mixers=(latent,) * num_layers, head_dim=latent.rotary, ties_embeddings=True)
