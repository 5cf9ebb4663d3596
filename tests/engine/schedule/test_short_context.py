"""Requests that outgrow the short context of LongRoPE answer as transformers does: below it, beyond it, and across."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.architectures.checkpoints import NUM_OUTPUT_TOKENS, Golden, reference_ids, write
from tests.architectures.serving import NATIVE, serve
from tests.architectures.shrink import VOCAB_SIZE
from tests.engine.test_golden import run
from weft.engine.start.startup import start
from weft.engine.wire.inputs import TokensInput
from weft.engine.wire.messages import AddRequest, EngineOptions
from weft.engine.wire.params import SamplingParams

pytestmark = pytest.mark.filterwarnings("default")  # what modules of transformers warn of is no failure here

SHORT_CONTEXT, NUM_TOKENS = 40, 24
ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.5] * 8,
    "long_factor": [float(n) for n in range(3, 11)],
}
LENGTHS = (3, SHORT_CONTEXT - NUM_OUTPUT_TOKENS, *range(SHORT_CONTEXT - 4, SHORT_CONTEXT + 3), 90)
VARIANTS: list[dict[str, Any]] = [
    {},
    {"rope_parameters": {**ROPE, "factor": 32.0}},
    {"rope_parameters": {**ROPE, "attention_factor": 1.3}},
    {"rope_parameters": {**ROPE, "short_factor": [1.0] * 6, "long_factor": [4.0] * 6, "partial_rotary_factor": 0.75}},
]


def write_phi3(folder: Path, changes: dict[str, Any]) -> Path:
    fields = {
        "rope_parameters": ROPE,
        "original_max_position_embeddings": SHORT_CONTEXT,
        "max_position_embeddings": 256,
    }
    return write("phi3", folder / "phi3", fields | changes)


def prompts_of(lengths: Sequence[int]) -> list[list[int]]:
    """Each begins as all others do."""
    ids = ((torch.arange(max(lengths)) * 7919 + 5) % (VOCAB_SIZE - 4) + 4).tolist()
    return [ids[:length] for length in lengths]


@pytest.mark.parametrize("changes", VARIANTS)
def test_ids_are_those_of_transformers_at_any_length(tmp_path: Path, changes: dict[str, Any]) -> None:
    """The context ended where the long factors begin."""
    folder, prompts = write_phi3(tmp_path, changes), prompts_of(LENGTHS)
    outputs = [reference_ids(folder, prompt, NUM_OUTPUT_TOKENS) for prompt in prompts]
    assert len(set(map(tuple, outputs))) > len(prompts) // 2
    assert serve(folder, Golden(prompts, outputs)).outcome == NATIVE


@pytest.mark.parametrize("own", ["ngram", "draft model"])
def test_drafts_end_where_the_short_context_does(tmp_path: Path, own: str) -> None:
    """A draft behind it would have been verified with short factors.."""
    folder, prompts = write_phi3(tmp_path, {}), prompts_of(range(SHORT_CONTEXT - 10, SHORT_CONTEXT + 2))
    prompts += [prompt[:9] * 4 for prompt in prompts[:1]]
    options = EngineOptions(
        model=str(folder),
        device="cpu",
        dtype="float32",
        kv_cache_memory=16 << 20,
        block_size=8,
        speculative="ngram" if own == "ngram" else str(folder),
    )
    engine = start(options, "test").engine
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    adds = [AddRequest(TokensInput(prompt), params, request_id=number) for number, prompt in enumerate(prompts)]
    results = run(engine, adds)
    assert engine.scheduler.counters.num_preemptions >= 9
    assert engine.scheduler.counters.num_draft_tokens > 0
    for number, prompt in enumerate(prompts):
        assert results[number, 0].token_ids == reference_ids(folder, prompt, NUM_TOKENS)
