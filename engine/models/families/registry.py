"""Architecture names of config.json -> families, and which of them a checkpoint is. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from weft.engine.models.families.family import Family, FamilySwitches
from weft.engine.models.families.fields import Fields
from weft.engine.models.families.gemma import gemma, gemma2
from weft.engine.models.families.llama import llama
from weft.engine.models.families.mistral import mistral
from weft.engine.models.families.qwen2 import qwen2
from weft.engine.models.families.qwen3 import qwen3
from weft.engine.shared.errors import ModelError

FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "GemmaForCausalLM": gemma,
    "Gemma2ForCausalLM": gemma2,
}


@dataclass(frozen=True, slots=True)
class Identity:
    """What config.json says first: the architecture, its family's switches, and all fields for who reads on."""

    architecture: str
    switches: FamilySwitches
    fields: Fields


def identify(folder: Path) -> Identity:
    """Tell the family of a model folder.

    Raises:
        ModelError: config.json is missing or malformed, or the model is of no family or quantized.
    """
    fields = Fields.read(folder / "config.json")
    architectures = fields.texts("architectures")
    if not architectures:
        raise ModelError(f"{folder / 'config.json'}: names no architecture")
    switches = find_family(architectures[0])(fields)
    quantization = fields.section("quantization_config")
    if quantization.names():
        method = quantization.optional_text("quant_method") or "unnamed"
        raise ModelError(f"quantized checkpoints are not supported (quantization_config: {method})")
    return Identity(architectures[0], switches, fields)


def find_family(architecture: str) -> Family:
    """The family of an architecture. Raises ModelError, with the list of those supported, when there is none."""
    family = FAMILIES.get(architecture)
    if family is None:
        raise ModelError(f"architecture {architecture} is not supported (supported: {', '.join(FAMILIES)})")
    return family
