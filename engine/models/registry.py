"""Architecture names of config.json -> families."""

from collections.abc import Mapping

from engine.models.errors import ModelError
from engine.models.family import Family
from engine.models.gemma import gemma, gemma2
from engine.models.llama import llama
from engine.models.mistral import mistral
from engine.models.qwen2 import qwen2
from engine.models.qwen3 import qwen3

FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "GemmaForCausalLM": gemma,
    "Gemma2ForCausalLM": gemma2,
}


def find_family(architecture: str) -> Family:
    """The family of an architecture. Raises ModelError, with the list of those supported, when there is none."""
    family = FAMILIES.get(architecture)
    if family is None:
        raise ModelError(f"architecture {architecture} is not supported (supported: {', '.join(FAMILIES)})")
    return family
