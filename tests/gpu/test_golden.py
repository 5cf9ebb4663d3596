"""The engine, started as the server starts it, answers what transformers answers in float32, id for id.

With steps launched ahead and CUDA graphs, and without: that they are equal to transformers makes them equal to each
other. The prompts are those whose best id is clearly best, so a difference is a fault, not rounding.
"""

import itertools
from pathlib import Path

import pytest
import torch

from tests.checkpoints import WIDE_CHECKPOINTS, load_reference
from tests.engine.test_golden import NUM_OUTPUT_TOKENS, NUM_PROMPTS, Golden, golden, greedy, run
from tests.gpu.harness import DEVICES, GOLDEN_SIZES, graphs, start_engine, without
from weft.engine.loop.engine import Engine
from weft.engine.wire.inputs import TokensInput
from weft.engine.wire.messages import AddRequest
from weft.engine.wire.params import SamplingParams

BLOCK_SIZES = [
    *itertools.product(WIDE_CHECKPOINTS, (16, 64), ["cpu"]),
    *(pytest.param(*sizes, "cuda", marks=pytest.mark.gpu) for sizes in GOLDEN_SIZES),
]


def check(engine: Engine, expected: Golden, numbers: range, num_choices: int = 1) -> None:
    adds = [greedy(number, expected.prompts[number], num_choices) for number in numbers]
    results = run(engine, adds)
    assert len(results) == len(numbers) * num_choices
    for (number, _), output in results.items():
        assert output.token_ids == expected.outputs[number]


@pytest.mark.parametrize(("name", "block_size", "device"), BLOCK_SIZES)
def test_greedy_ids_are_those_of_transformers(golden_root: Path, name: str, block_size: int, device: str) -> None:
    expected = golden(golden_root, name)
    engine = start_engine(
        expected.folder, device, block_size=block_size, max_num_seqs=32, max_num_batched_tokens=32 + 2 * block_size
    )
    check(engine, expected, range(NUM_PROMPTS))
    check(engine, expected, range(NUM_PROMPTS))  # from the prefix cache
    assert engine.scheduler.counters.prefix_cache_hits > 0 or block_size == 64
    check(engine, expected, range(1))
    check(engine, expected, range(5, 10), num_choices=3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "mean", "largest"), [("bfloat16", 0.05, 0.6), ("float16", 0.01, 0.1)])
@pytest.mark.parametrize("name", list(WIDE_CHECKPOINTS))
def test_in_16_bits_log_probabilities_are_near_those_of_transformers(
    golden_root: Path, name: str, dtype: str, mean: float, largest: float, device: str
) -> None:
    """Ids may differ there, so what is written is given to transformers, which weighs every token in float32."""
    expected = golden(golden_root, name)
    engine = start_engine(expected.folder, device, dtype=dtype, max_num_batched_tokens=64, max_num_seqs=32)
    params = SamplingParams(
        temperature=0.0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True, logprobs=0, prompt_logprobs=0
    )
    outputs = run(
        engine,
        [AddRequest(TokensInput(prompt), params, request_id=number) for number, prompt in enumerate(expected.prompts)],
    )
    reference, differences = load_reference(expected.folder), []
    for (number, _), output in outputs.items():
        token_ids = torch.tensor([*expected.prompts[number], *output.token_ids])
        with torch.no_grad():
            logits = reference(token_ids[None]).logits[0, :-1]
        exact = logits.log_softmax(-1).gather(1, token_ids[1:, None])[:, 0]
        prompt = [entry for entry in output.prompt_logprobs or [] if entry is not None]
        ours = [entry.logprob for entry in (*prompt, *(output.logprobs or []))]
        differences.append((exact - torch.tensor(ours)).abs())
    together = torch.cat(differences)
    assert together.mean() < mean and together.max() < largest


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("features", [("graphs",), ("overlap",), ("graphs", "overlap")], ids="+".join)
def test_graphs_and_overlap_change_nothing(golden_root: Path, features: tuple[str, ...], device: str) -> None:
    expected = golden(golden_root, "qwen3-wide")
    engine = start_engine(expected.folder, device)
    params = SamplingParams(
        temperature=0.9, top_p=0.95, seed=3, presence_penalty=0.5, logprobs=2, max_tokens=NUM_OUTPUT_TOKENS
    )
    sampled = [
        AddRequest(TokensInput(prompt), params, request_id=number) for number, prompt in enumerate(expected.prompts)
    ]
    outputs = []
    for _ in range(2):
        check(engine, expected, range(NUM_PROMPTS))
        outputs.append({key: output.token_ids for key, output in run(engine, sampled).items()})
    with without(engine, *features):
        check(engine, expected, range(NUM_PROMPTS))
        outputs.append({key: output.token_ids for key, output in run(engine, sampled).items()})
    assert outputs[0] == outputs[1] == outputs[2]
    assert max(map(len, outputs[0].values())) == NUM_OUTPUT_TOKENS
    if device == "cuda":
        owner = graphs(engine)
        assert owner is not None, "the engine uses no CUDA graphs"
        assert owner._graphs, "no step was recorded"
