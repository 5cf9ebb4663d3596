"""Finds the family of a checkpoint by the architecture name in its config.json, and what it is for. Imports no torch.

Every module of this folder is imported, and the families in it make themselves known (`switches.family`). Of a
checkpoint that also reads images or sounds, the text half is served alone, as the model that it is.
"""

import importlib.util
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from weft.engine import families
from weft.engine.families.switches import FAMILIES, FamilySwitches, UseModule
from weft.engine.fields import Fields, understood
from weft.engine.vision.families import SEEING
from weft.engine.weights.quantization import Quantization, read_quantization
from weft.engine.wire.errors import ModelError
from weft.engine.wire.machine import package_version

for _module in pkgutil.iter_modules(families.__path__):
    if _module.name != __name__.rpartition(".")[2]:
        importlib.import_module(f"{families.__name__}.{_module.name}")

_ROPES = ("rope_scaling", "rope_parameters")
"""Sections whose numbers count."""
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


_BOTH_WAYS = "each token of a prompt sees those behind it, which prompts in chunks and cached prefixes cannot have"
_REFUSED = {"PaliGemmaForConditionalGeneration": _BOTH_WAYS}


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
    if architecture in _REFUSED:
        raise ModelError(f"architecture {architecture} is not supported: {_REFUSED[architecture]}")
    if model_impl != "transformers":
        half = text_half(architecture, fields)
        name, own = half if half and half[0] in FAMILIES else (architecture, fields)
        family = FAMILIES.get(name)
    if family is None and model_impl == "native":
        message = f"architecture {architecture} is not supported natively (`weft models --architectures` lists what is)"
        raise ModelError(message)
    switches = None
    if family:
        try:
            with understood(folder / "config.json"):
                switches = family(own := own.with_aliases(_ALIASES))
            own.check_own(_ROPES)
            architecture, fields = name, own
        except UseModule:
            if model_impl == "native":
                raise
    if switches is None and not _is_transformers(architecture, fields):
        raise ModelError(
            f"architecture {architecture} is not supported: it has no native family, and transformers "
            f"{package_version('transformers')} has no model of this name"
        )
    quantization = read_quantization(fields.section("quantization_config"), folder)
    if quantization and switches is None:
        raise ModelError(
            f"quantized checkpoints are not supported for {architecture}, which transformers' module computes; "
            "take the one that is not quantized"
        )
    return Identity(architecture, switches, fields, quantization)


def _is_transformers(architecture: str, fields: Fields) -> bool:
    """Whether transformers names a model so, or its text half; True where that cannot be seen without importing it.

    Imports take long, and then only its modules can say whether they can be served.
    """
    spec = importlib.util.find_spec("transformers")
    folders = spec.submodule_search_locations if spec else None
    table = Path(folders[0], "models", "auto", "modeling_auto.py") if folders else None
    if table is None or not table.is_file():
        return True
    text, half = table.read_text(encoding="utf-8"), fields.section("text_config").optional_text("model_type")
    has_code = fields.has("auto_map")  # which is refused by name
    return has_code or any(f'"{name}"' in text for name in (architecture, half) if name)


_TEXT_HALVES: Mapping[str, str] = {
    "cohere2": "Cohere2ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "exaone4_5_text": "Exaone4ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3n_text": "Gemma3nForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "granite": "GraniteForCausalLM",
    "hyperclovax": "HyperCLOVAXForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mllama_text_model": "MllamaForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
    "qwen3_vl_moe_text": "Qwen3MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}
"""Architecture by model_type of a text_config. In text all three positions of Qwen's are the same."""

_FLAT: Mapping[str, str] = {
    "Qwen2VLForConditionalGeneration": "Qwen2ForCausalLM",
    "Qwen2_5_VLForConditionalGeneration": "Qwen2ForCausalLM",
}

_OTHER_HALVES = ("Gemma4Unified", "Llama4")
_WRAPPERS = SEEING.keys() | {f"{name}ForConditionalGeneration" for name in _OTHER_HALVES}
"""Those whose files say all that the text half needs. Others may tie their output head without a word of it."""

_INHERITED = ("dtype", "torch_dtype", "tie_word_embeddings", "eos_token_id", "quantization_config")


def _sizes(vocab: int, hidden: int, inner: int, layers: int, heads: int, positions: int, **more: int) -> dict[str, int]:
    sizes = {"vocab_size": vocab, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    return {**sizes, "num_attention_heads": heads, "max_position_embeddings": positions, **more}


_LEFT_OUT: Mapping[str, Mapping[str, int]] = {
    "cohere2": _sizes(256_000, 8192, 22_528, 40, 64, 8192, eos_token_id=255_001),
    "gemma3_text": _sizes(262_208, 2304, 9216, 26, 8, 131_072, num_key_value_heads=4, head_dim=256, eos_token_id=1),
    "gemma4_text": {"eos_token_id": 1},
    "granite": _sizes(32_000, 4096, 11_008, 32, 32, 2048, eos_token_id=2),
    "llama": _sizes(32_000, 4096, 11_008, 32, 32, 2048, eos_token_id=2),
    "llama4_text": {"eos_token_id": 2},
    "ministral3": {"eos_token_id": 2},
    "mistral": _sizes(32_000, 4096, 14_336, 32, 32, 131_072, num_key_value_heads=8, eos_token_id=2),
    "mllama_text_model": _sizes(128_256, 4096, 14_336, 40, 32, 131_072, eos_token_id=128_001),
    "qwen2": _sizes(151_936, 4096, 22_016, 32, 32, 32_768, num_key_value_heads=32),
    "qwen3": _sizes(151_936, 4096, 22_016, 32, 32, 32_768, num_key_value_heads=32),
}
"""Fields that a text_config of this model_type leaves out where they are the defaults of transformers' class."""


def text_half(architecture: str, fields: Fields) -> tuple[str, Fields] | None:
    """Architecture and fields of the text half of a checkpoint; None if it has no halves, or an unknown one.

    config.json keeps its fields in text_config. Older files of Qwen keep them beside the others.
    """
    text = fields.section("text_config")
    if not text.names():
        return (_FLAT[architecture], fields) if architecture in _FLAT else None
    model_type = text.optional_text("model_type") or ""
    known = _TEXT_HALVES.get(model_type) if architecture in _WRAPPERS else None
    name = architecture if architecture.endswith("ForCausalLM") else known
    return (name, text.inheriting(fields, _INHERITED).with_defaults(_LEFT_OUT.get(model_type, {}))) if name else None


_EAGLE = frozenset({"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"})


def is_eagle(folder: Path) -> bool:
    """Whether a checkpoint is a head that drafts for another model (EAGLE-3), and no model."""
    path = folder / "config.json"
    return path.is_file() and not _EAGLE.isdisjoint(Fields.read(path).texts("architectures"))


CLASSIFIER = "ForSequenceClassification"
_HEADLESS = ("Model", "ForMaskedLM", "ForPreTraining")
_SCORE_MODULE = "LogitScore"


def is_headless(architecture: str) -> bool:
    """Whether models of this name have no head that writes text, nor one of a classifier."""
    return architecture.endswith(_HEADLESS) and not architecture.endswith(("HeadModel", "MTModel"))


def own_task(folder: Path) -> str:
    """What the checkpoint is for: generate, embed or classify.

    A reranker that answers yes or no is a causal model with one of two marks: a module `LogitScore`, or
    `classifier_from_token` in config.json (vLLM), the texts of no and yes.

    Raises:
        ModelError: A file is missing or malformed.
    """
    fields = Fields.read(folder / "config.json")
    architecture = (*fields.texts("architectures"), "")[0]
    modules = module_kinds(folder)
    if architecture.endswith(CLASSIFIER) or fields.has("classifier_from_token") or _SCORE_MODULE in modules:
        return "classify"
    return "embed" if modules or is_headless(architecture) else "generate"


def module_kinds(folder: Path) -> list[str]:
    """The kinds of the modules of sentence-transformers, such as Pooling; none without modules.json."""
    path = folder / "modules.json"
    if not path.exists():
        return []
    return [(fields.optional_text("type") or "").rpartition(".")[2] for fields in Fields.read_list(path)]
