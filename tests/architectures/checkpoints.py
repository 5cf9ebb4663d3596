"""A tiny random float32 checkpoint of every causal architecture of transformers, and what transformers answers to it.

`OUTCOMES` says of each of its model types whether one can be written. Nothing here knows what Weft can serve.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.architectures.exceptions import CHANGES, NEVER_BUILT, NO_DECODERS, QUIET_VECTORS, SEEDS
from tests.architectures.shrink import SIZES, shrink

BUILT = "built"
NUM_PROMPTS = 6
NUM_OUTPUT_TOKENS = 8
MIN_GAP = 2e-3
NOISE = 0.15
"""What is added to every weight: greedy choices of a freshly initialised model hang on rounding."""

LOUD_NOISE = 2.0
"""The same for the last norm, whose signs get mixed, and attention sinks. With tied embeddings the best id would else
be the last one again."""


@dataclass(frozen=True)
class Golden:
    """Prompts and what transformers answers: clearly, and the same with its cache and without."""

    prompts: list[list[int]]
    outputs: list[list[int]]


def _outcome(name: str) -> str:
    if name in NO_DECODERS:
        return f"no decoder: {NO_DECODERS[name]}"
    return f"cannot be built: {NEVER_BUILT[name]}" if name in NEVER_BUILT else BUILT


OUTCOMES: dict[str, str] = {name: _outcome(name) for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
"""Of each model type "built", or why there is no checkpoint of it."""


def names() -> list[str]:
    """The model types that `write` can write."""
    return [name for name, outcome in OUTCOMES.items() if outcome == BUILT]


def tiny_config(name: str, changes: Mapping[str, Any] | None = None) -> PreTrainedConfig:
    """The default configuration of a model type, shrunk, then changed."""
    config_class = CONFIG_MAPPING[name]
    fields = _merge(shrink(config_class()), CHANGES.get(name, {}))
    config: PreTrainedConfig = config_class(**_merge(fields, changes or {}))
    return config


def write(name: str, folder: Path, changes: Mapping[str, Any] | None = None) -> Path:
    """Write config.json, generation_config.json and safetensors; the same bytes whenever it is called.

    Args:
        changes: Fields of the configuration, None for none.
    """
    load_reference.cache_clear()
    torch.manual_seed(SEEDS.get(name, 0))
    config = tiny_config(name, changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    stored = model.state_dict()
    biases = [(key, value) for key, value in model.named_buffers() if key in stored and not value.any()]  # of experts
    norms = [key for key, value in model.named_parameters() if value.ndim == 1 and key.endswith("weight")]
    with torch.no_grad():
        for key, tensor in (*model.named_parameters(), *biases):
            if tensor.is_floating_point():
                quiet = QUIET_VECTORS.get(name, NOISE) if tensor.ndim == 1 else NOISE
                noise = LOUD_NOISE if key in norms[-1:] or key.endswith("sinks") else quiet
                tensor.add_(torch.randn_like(tensor) * noise)
    generation = model.generation_config
    generation.bos_token_id, generation.eos_token_id, generation.pad_token_id = 1, [2, 3], 0
    model.save_pretrained(folder)
    if type(model.config) is not type(config):  # the text half of a wrapped configuration, which is what is published
        config.architectures = model.config.architectures
        config.save_pretrained(folder)
    return folder


@lru_cache(maxsize=1)
def load_reference(folder: Path, attention: str = "eager") -> torch.nn.Module:
    """The checkpoint as transformers reads it: float32, with an attention of transformers."""
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=attention
    )
    return model.eval()


def reference_ids(folder: Path, prompt: list[int], num_tokens: int) -> list[int]:
    """What transformers' plain greedy generate adds to the prompt, up to an end id."""
    return _generate(folder, prompt, num_tokens)[0]


def golden(folder: Path) -> Golden:
    """Prompts of mixed lengths, half of them with a common start, and their answers.

    Raises:
        AssertionError: Too few prompts have clear answers, or the model answers everything alike.
    """
    generator = random.Random(7)
    prefix = [generator.randrange(4, SIZES["vocab_size"]) for _ in range(40)]
    prompts: list[list[int]] = []
    outputs: list[list[int]] = []
    num_tries = 0
    while len(prompts) < NUM_PROMPTS and num_tries < 8 * NUM_PROMPTS:
        num_tries += 1
        tail = [generator.randrange(4, SIZES["vocab_size"]) for _ in range(generator.randrange(1, 30))]
        prompt = prefix + tail if len(prompts) % 2 else tail
        output, gap = _generate(folder, prompt, NUM_OUTPUT_TOKENS)
        if gap > MIN_GAP and output == _ids_of_one_pass(folder, prompt, output):
            prompts.append(prompt)
            outputs.append(output)
    assert len(prompts) == NUM_PROMPTS, f"{len(prompts)} of {num_tries} prompts have clear answers"
    assert len({tuple(output) for output in outputs}) > NUM_PROMPTS // 2, "the model answers everything alike"
    return Golden(prompts, outputs)


def _generate(folder: Path, prompt: list[int], num_tokens: int) -> tuple[list[int], float]:
    """The ids, and by how much the best of them was better than the second best in the closest case."""
    with torch.no_grad():
        answer = load_reference(folder).generate(  # type: ignore[operator]
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=num_tokens,
            output_scores=True,
            return_dict_in_generate=True,
        )
    best = torch.stack(answer.scores).topk(2).values  # (num_output_tokens, 1, 2)
    return answer.sequences[0, len(prompt) :].tolist(), float((best[..., 0] - best[..., 1]).min())


def _ids_of_one_pass(folder: Path, prompt: list[int], output: list[int]) -> list[int]:
    """The best ids at the positions of the output, all computed at once and without a cache."""
    with torch.no_grad():
        logits = load_reference(folder)(torch.tensor([prompt + output]), use_cache=False).logits[0]
    best: list[int] = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    return best


def _merge(fields: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The changes over the fields, in nested configurations, too."""
    inner = {key: _merge(fields[key], value) for key, value in changes.items() if key.endswith("_config")}
    return {**fields, **changes, **{key: value for key, value in inner.items() if key in fields}}
