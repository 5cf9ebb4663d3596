"""Finds the family of a checkpoint by the architecture name in its config.json. Imports no torch.

Every module of this folder is imported, and the families in it make themselves known (`family.family`).
"""

import importlib
import pkgutil
from dataclasses import dataclass
from pathlib import Path

from weft.engine.fields import Fields
from weft.engine.models import families
from weft.engine.models.families.family import FAMILIES, FamilySwitches, UseModule
from weft.engine.models.families.wrappers import text_half
from weft.engine.shared.errors import ModelError
from weft.engine.weights.quantization import read_quantization
from weft.engine.weights.scheme import Quantization

for _module in pkgutil.iter_modules(families.__path__):
    if _module.name != __name__.rpartition(".")[2]:
        importlib.import_module(f"{families.__name__}.{_module.name}")

# Names that some configurations have for fields of this meaning.
_ALIASES = {
    "n_embd": "hidden_size",
    "d_model": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_layers": "num_hidden_layers",
    "num_layers": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_heads": "num_attention_heads",
    "n_inner": "intermediate_size",
    "ffn_dim": "intermediate_size",
    "block_ff_dim": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "max_seq_len": "max_position_embeddings",
    "activation_function": "hidden_act",
    "layer_norm_epsilon": "rms_norm_eps",
    "layer_norm_eps": "rms_norm_eps",
    "norm_epsilon": "rms_norm_eps",
    "norm_eps": "rms_norm_eps",
    "rotary_pct": "partial_rotary_factor",
    "rotary_emb_base": "rope_theta",
}


@dataclass(frozen=True, slots=True)
class Identity:
    """What `identify` found: the architecture, its family's switches, and all fields of config.json.

    Those of the text half, where Weft serves that half of a checkpoint alone.

    Without switches, transformers' own module computes the model. Without quantization, weights are stored as they are.
    """

    architecture: str
    switches: FamilySwitches | None
    fields: Fields
    quantization: Quantization | None


def generating(architecture: str) -> str:
    """The architecture with an output head whose family computes this one, which may lack that or have another."""
    for ending in ("ForSequenceClassification", "Model"):
        name = architecture.removesuffix(ending) + "ForCausalLM"
        if architecture.endswith(ending) and architecture not in FAMILIES and name in FAMILIES:
            return name
    return architecture


def identify(folder: Path, model_impl: str = "auto") -> Identity:
    """Find the family of a model folder.

    Args:
        model_impl: native refuses architectures without a family; transformers looks for none.

    Raises:
        ModelError: config.json is missing or malformed, the architecture is not supported, or weights are quantized in
            a form that is not read.
    """
    fields = Fields.read(folder / "config.json")
    architectures = fields.texts("architectures")
    if not architectures:
        raise ModelError(f"{folder / 'config.json'}: names no architecture")
    architecture, family = generating(architectures[0]), None
    if model_impl != "transformers":
        half = text_half(architecture, fields)
        name, own = half if half and half[0] in FAMILIES else (architecture, fields)
        family = FAMILIES.get(name)
    if family is None and model_impl == "native":
        raise ModelError(
            f"architecture {architecture} is not supported natively (`weft models --architectures` lists what is)"
        )
    switches = None
    if family:
        try:
            switches = family(own := own.with_aliases(_ALIASES))
            architecture, fields = name, own
        except UseModule:
            if model_impl == "native":
                raise
    quantization = read_quantization(fields.section("quantization_config"), folder)
    if quantization and switches is None:
        raise ModelError(
            f"quantized checkpoints are not supported for {architecture}, which transformers' module computes; "
            "take the one that is not quantized"
        )
    return Identity(architecture, switches, fields, quantization)
