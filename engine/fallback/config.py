"""Facts of a checkpoint whose architecture has no native family, from transformers' own classes, and its linear layers.

Builds the module on the meta device, which takes no memory. Refuses with a `ModelError` what is no causal language
model of transformers, and what brings code of its own. What Weft's attention cannot compute runs request by request.
Weft's kernels can take the place of the module's linear layers.
"""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from weft.engine.cache.specs import CacheSpec, ModuleCache
from weft.engine.describe.config import ModelFacts, read_dtype, read_eos_token_ids
from weft.engine.fallback.attention_calls import RECORDING, RecordedCalls, record
from weft.engine.families.registry import Identity
from weft.engine.fields import Fields
from weft.engine.wire.errors import ModelError

_UNNAMED_CONTEXT = 8192
"""Longest context, in tokens, where config.json names none, as with ALiBi and recurrent layers."""

_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}

_AUTO_MODEL: Any = AutoModelForCausalLM  # without types


@dataclass(frozen=True, slots=True)
class FallbackConfig(ModelFacts):
    """A checkpoint that transformers' module computes.

    Attributes:
        calls: How the module attends; None if it runs request by request, with an attention and caches of its own.
        reason: Why it does.
        is_half: Whether only the text half of a checkpoint is served, by the module of that half.
        config: Of transformers, as config.json has it.
        model_class: Of transformers.
        num_values: Values of all weights; shared ones count once.
        is_linear: Whether every matrix is a linear layer or an embedding.
    """

    calls: RecordedCalls | None
    reason: str
    is_half: bool
    config: PreTrainedConfig
    model_class: type[PreTrainedModel]
    num_values: int
    is_linear: bool

    @property
    def cache_specs(self) -> tuple[CacheSpec, ...]:
        """What each layer keeps; for a module that runs request by request what as many plain layers would keep."""
        if self.calls is not None:
            return tuple(layer.cache for layer in self.calls.layers)
        num_layers = getattr(self.config.get_text_config(), "num_hidden_layers", 1)
        per_layer = 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize
        return (ModuleCache(num_layers * per_layer, 0),)


def load_fallback_config(folder: Path, identity: Identity) -> FallbackConfig:
    """Read the configuration of a model folder in Hugging Face layout.

    Raises:
        ModelError: A file is malformed, or the model cannot be served.
    """
    architecture, fields = identity.architecture, identity.fields
    Fields.read(folder / "config.json").check_all()
    config, is_half = _read_config(folder, architecture, fields)
    text = config.get_text_config()
    for name in ("vocab_size", "hidden_size"):
        if (_integer(text, name) or 0) < 1:
            raise ModelError(f"{folder / 'config.json'}: {name} must be a positive integer, got {getattr(text, name)}")
    longest_context = _longest_context(text)
    try:
        module, calls, reason = _inspect(config, text, longest_context)
    except ModelError as error:
        try:  # the text half alone: the others may need what is not installed
            module, calls, reason = _inspect(text, text, longest_context)
        except ModelError:
            raise ModelError(f"architecture {architecture} is not supported: {error}") from None
        is_half = True
    heads = _heads(text, calls)
    return FallbackConfig(
        architecture=architecture,
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=heads[2],
        intermediate_size=_widest(module, text) + (0 if calls else text.vocab_size),  # logits of all tokens
        max_position_embeddings=longest_context,
        dtype=read_dtype(fields),
        eos_token_ids=read_eos_token_ids(folder, Fields(text.to_dict(), type(text).__name__), text.vocab_size),
        calls=calls,
        reason=reason,
        is_half=is_half,
        config=config if isinstance(config, type(module).config_class or PreTrainedConfig) else text,
        model_class=type(module),
        num_values=sum(parameter.numel() for parameter in module.parameters()),
        is_linear=calls is not None and can_pack(module),
    )


def _inspect(
    config: PreTrainedConfig, text: PreTrainedConfig, longest_context: int
) -> tuple[PreTrainedModel, RecordedCalls | None, str]:
    """The module without weights, and how it attends or why it runs request by request."""
    try:
        _check_layer_types(text)
        module = _meta_module(config, RECORDING)
        if module._is_stateful:
            raise ModelError("it keeps a recurrent state instead of keys and values")
        calls = record(module, longest_context)
        _check_layers(module, text, calls)
    except ModelError as error:
        return _meta_module(config, "eager"), None, str(error)
    return module, calls, ""


def _heads(text: PreTrainedConfig, calls: RecordedCalls | None) -> tuple[int, int, int]:
    """Query heads, key-value heads and the values of a head, of the largest layer."""
    if calls is not None:
        caches = [layer.cache for layer in calls.layers]
        most = max(layer.num_heads for layer in calls.layers)
        return most, max(c.num_kv_heads for c in caches), max(c.head_dim for c in caches)
    num_heads = _integer(text, "num_attention_heads") or 1
    head_dim = _integer(text, "head_dim") or text.hidden_size // num_heads
    return num_heads, _integer(text, "num_key_value_heads") or num_heads, head_dim


def _integer(text: PreTrainedConfig, name: str) -> int | None:
    value = getattr(text, name, None)
    return value if isinstance(value, int) else None


def _read_config(folder: Path, architecture: str, fields: Fields) -> tuple[PreTrainedConfig, bool]:
    """The configuration to build a module with, and whether it is that of a text half."""
    model_type = fields.optional_text("model_type") or ""
    if model_type not in CONFIG_MAPPING and fields.has("auto_map"):
        message = f"architecture {architecture} comes with code of its own, and Weft runs no code of checkpoints"
        raise ModelError(message)
    half_type = fields.section("text_config").optional_text("model_type")
    is_whole = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type) == architecture
    if not is_whole and (model_type not in CONFIG_MAPPING or half_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        raise ModelError(
            f"architecture {architecture} is not supported: it has no native family, and transformers "
            f"{transformers.__version__} has no causal language model of this name for model_type {model_type!r}"
        )
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # transformers checks fields in many ways
        fault = " ".join(str(error).split())
        raise ModelError(f"{folder / 'config.json'}: {type(error).__name__}: {fault[:200]}") from None
    if any(getattr(part, "quantization_config", None) for part in (config, config.get_text_config())):
        raise ModelError(f"{folder / 'config.json'}: quantized checkpoints are not supported (quantization_config)")
    for part in (config, config.get_text_config()):  # nothing that only training or studies ask for
        part.return_dict = True
        part.output_attentions = part.output_hidden_states = False
        if hasattr(part, "output_router_logits"):
            part.output_router_logits = False
    if config.is_encoder_decoder:
        raise ModelError(f"architecture {architecture} is not supported: it has an encoder")
    return (config if is_whole else config.get_text_config()), not is_whole


def _check_layer_types(text: PreTrainedConfig) -> None:
    """Refuse by name what would otherwise fail with an error of somebody else's module."""
    listed = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ()
    if unknown := sorted({str(layer_type) for layer_type in listed} - _LAYER_TYPES):
        raise ModelError(f"it has layers of type {', '.join(unknown)}")
    if getattr(text, "attn_temperature_tuning", False):
        raise ModelError("its module scales queries by their place in a step (attn_temperature_tuning)")


def _longest_context(text: PreTrainedConfig) -> int:
    """Longest context for which the rotary frequencies of a request do not depend on its length, or on others."""
    names = ("max_position_embeddings", "max_seq_len", "seq_length", "context_length")
    longest = next((value for name in names if (value := _integer(text, name))), _UNNAMED_CONTEXT)
    rope = getattr(text, "rope_parameters", None) or {}
    for section in (rope, *rope.values()):
        if isinstance(section, dict) and section.get("rope_type") == "longrope":  # two sets of frequencies
            longest = min(longest, section.get("original_max_position_embeddings") or longest)
    return longest


def _meta_module(config: PreTrainedConfig, attention: str) -> PreTrainedModel:
    """The module without weights, with a named attention; experts in a way that needs no values."""
    config = copy.deepcopy(config)
    config._experts_implementation = "batched_mm"
    try:
        with torch.device("meta"):
            module: PreTrainedModel = _AUTO_MODEL.from_config(config, attn_implementation=attention)
    except Exception as error:  # whatever somebody else's module raises
        if isinstance(error, KeyError) and error.args == (attention,):  # it looks its attention up in a table
            raise ModelError("its attention does not go through transformers' AttentionInterface") from None
        fault = str(error).strip().partition("\n")[0]  # some begin with an empty line
        raise ModelError(f"its module cannot be built ({type(error).__name__}: {fault})") from None
    module.train(False)
    return module


def _check_layers(module: PreTrainedModel, text: PreTrainedConfig, calls: RecordedCalls) -> None:
    """Refuse modules that may keep something else between tokens than keys and values."""
    num_layers = text.num_hidden_layers
    if len(calls.layers) < num_layers:
        raise ModelError(f"only {len(calls.layers)} of its {num_layers} layers attend")
    mixing = [name for name, part in module.named_modules() if isinstance(part, torch.nn.Conv1d)]
    if any(name.startswith(f"{calls.body}.") for name in mixing):
        raise ModelError(f"{mixing[0]} mixes neighbouring tokens")
    for layer in calls.layers:
        if layer.num_heads % layer.cache.num_kv_heads:
            raise ModelError(f"{layer.name} has {layer.num_heads} heads over {layer.cache.num_kv_heads} of keys")


def _widest(module: PreTrainedModel, text: PreTrainedConfig) -> int:
    """Most outputs of a matrix inside the layers; a token may use several experts."""
    sizes = [size for parameter in module.parameters() for size in parameter.shape[-2:] if parameter.dim() > 1]
    widest = max((size for size in sizes if size != text.vocab_size), default=0)
    experts = getattr(text, "num_experts_per_tok", None) or 0
    named = getattr(text, "moe_intermediate_size", None) or getattr(text, "intermediate_size", None)
    of_experts = max(named) if isinstance(named, list | tuple) else named or text.hidden_size  # one for each layer
    return max(widest, int(experts * 2 * of_experts))


def can_pack(module: PreTrainedModel) -> bool:
    """Whether every matrix of a module, built on any device, is a linear layer or an embedding.

    Nothing is replaced in a module that has other matrices too, such as fused experts: those need torch's threads,
    which would take the cores from the kernels' own.
    """
    plain = torch.nn.Linear | torch.nn.Embedding
    known = {id(part.weight) for part in module.modules() if isinstance(part, plain)}
    return all(weight.dim() < 2 or id(weight) in known for weight in module.parameters())
