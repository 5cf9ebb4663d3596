"""Llama 2, 3 and 3.x, and what shares their architecture name."""

from weft.engine.models.families.family import FamilySwitches
from weft.engine.models.families.fields import Fields


def llama(fields: Fields) -> FamilySwitches:
    """Biases only where config.json asks for them."""
    attention_bias = fields.flag("attention_bias", False)
    return FamilySwitches(qkv_bias=attention_bias, o_bias=attention_bias, mlp_bias=fields.flag("mlp_bias", False))
