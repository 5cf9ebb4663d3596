"""Adapters as PEFT writes them, for tiny models, and what PEFT computes with them."""

import warnings
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import AutoModelForCausalLM

from tests.engine.test_golden import check_entry, run
from weft.engine.loop.engine import Engine
from weft.engine.start.startup import start
from weft.engine.wire.inputs import TokensInput
from weft.engine.wire.messages import AddRequest, EngineOptions, RequestOutput
from weft.engine.wire.options import Adapter, find_adapter
from weft.engine.wire.params import SamplingParams

NUM_OUTPUT_TOKENS = 6
ADAPTERS: dict[str, Adapter] = {}
"""Of the engine that was started last."""
PROMPTS = [[5, 9, 17, 30, 8, 11, 40], [7] * 19, [50, 3, 22], [12, 13, 14, 15, 16, 60, 61, 62, 20, 21]]


def write_adapter(model: Path, folder: Path, seed: int = 0, **config: Any) -> Any:
    """Write an adapter with random A and B, and modules; returns PEFT's model in float32."""
    torch.manual_seed(seed)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    settings = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | config
    with warnings.catch_warnings():  # of transformers, about what PEFT calls
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(base, peft.LoraConfig(**settings)).eval()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, parameter in adapted.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.normal_(0, 0.3)
        adapted.save_pretrained(folder)
    return adapted


def start_engine(model: Path, adapters: dict[str, Path], **more: Any) -> "Engine[Any]":
    """An engine with these adapters in its slots, in order."""
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_memory": 8 << 20, "max_model_len": 128}
    settings |= {"max_loras": max(len(adapters), 1), "max_lora_rank": 8} | more
    engine = start(EngineOptions(model=str(model), **settings), "epoch").engine
    engine.pending.adapters.load_first({name: str(folder) for name, folder in adapters.items()})
    ADAPTERS.update({name: find_adapter(name, folder) for name, folder in adapters.items()})
    return engine


def add(number: int, adapter: str | None, prompt: list[int], **params: Any) -> AddRequest:
    """A greedy request that reports log-probabilities, of its prompt too."""
    chosen: dict[str, Any] = {"logprobs": 3, "prompt_logprobs": 2, "max_tokens": NUM_OUTPUT_TOKENS} | params
    sampling = SamplingParams(temperature=0, ignore_eos=True, **chosen)
    return AddRequest(TokensInput(prompt), sampling, adapter=adapter and ADAPTERS[adapter], request_id=number)


def check(output: RequestOutput, prompt: list[int], reference: Any) -> None:
    """Every log-probability, and so the choice of every id, is that of a full pass of PEFT's model."""
    with torch.no_grad():
        logits = reference(torch.tensor([prompt + list(output.token_ids)])).logits[0]
    logprobs = torch.log_softmax(logits.double(), -1)
    reported = [*(output.prompt_logprobs or []), *(output.logprobs or [])]
    assert len(reported) == len(prompt) + NUM_OUTPUT_TOKENS - 1
    for position, entry in enumerate(reported):
        check_entry(entry, logprobs[position], (prompt + list(output.token_ids))[position + 1])
    for position, token_id in enumerate(output.token_ids, len(prompt) - 1):
        assert token_id == int(logprobs[position].argmax())


def check_all(engine: "Engine[Any]", references: dict[str | None, Any]) -> None:
    """All prompts with each adapter, in steps that they share."""
    cases = [(name, prompt) for prompt in PROMPTS for name in references]
    outputs = run(engine, [add(number, name, prompt) for number, (name, prompt) in enumerate(cases)])
    for number, (name, prompt) in enumerate(cases):
        check(outputs[number, 0], prompt, references[name])
