"""Greedy output of transformers' modules over Weft's cache equals transformers' generate, id for id."""

from functools import cache
from pathlib import Path

import pytest

from tests.engine.fallback.checkpoints import FALLBACK_CHECKPOINTS, write
from tests.engine.test_golden import (
    NUM_OUTPUT_TOKENS,
    Golden,
    OracleDrafter,
    PreemptingScheduler,
    answer,
    build_engine,
    check_logprobs,
    greedy,
    run,
)
from weft.engine import config as engine_config
from weft.engine.describe.config import ModelFacts
from weft.engine.layers.block import LoadedModel
from weft.engine.schedule.scheduler import Scheduler
from weft.engine.start.model_choice import plan_model, read_model
from weft.engine.wire.messages import EngineOptions

QUICK = ("phi3", "cohere2", "smollm3", "qwen3_moe", "deepseek_v3", "gpt2")
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FALLBACK_CHECKPOINTS]


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fallback")


@cache
def golden(root: Path, name: str) -> Golden:
    return answer(write(name, root / name))


def load(folder: Path) -> tuple[ModelFacts, LoadedModel]:
    """As start-up does, with its comparison of both ways to attend."""
    facts = read_model(folder, "transformers")
    options = EngineOptions(model=str(folder), device="cpu", dtype="float32", max_model_len=256)
    return facts, plan_model(facts, engine_config.resolve(options, facts)).load(folder, lambda done, total: None)


@pytest.mark.parametrize("is_hard", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_greedy_ids_are_those_of_transformers(root: Path, name: str, is_hard: bool) -> None:
    """Once at ease, once with chunks of 7 tokens, preemption, two choices and a warm prefix cache."""
    expected = golden(root, name)
    longest = max(map(len, expected.prompts)) + NUM_OUTPUT_TOKENS
    engine = build_engine(
        expected.folder,
        block_size=8,
        num_blocks=-(-longest // 8) + 3 if is_hard else 600,
        chunk=7 if is_hard else 4096,
        overlap=is_hard,
        scheduler_type=PreemptingScheduler if is_hard else Scheduler,
        load=load,
    )
    if is_hard:
        run(engine, [greedy(1000, expected.prompts[0]), greedy(1001, expected.prompts[1])])
    num_choices = 1 + is_hard
    results = run(engine, [greedy(n, prompt, num_choices) for n, prompt in enumerate(expected.prompts)])
    for number, output in enumerate(expected.outputs):
        for index in range(num_choices):
            assert results[number, index].token_ids == output
    assert (engine.scheduler.counters.num_preemptions > 0) == is_hard
    assert engine.scheduler.counters.prefix_cache_hits > 0


def test_drafts_change_nothing_but_the_number_of_steps(root: Path) -> None:
    expected = golden(root, "cohere2")
    engine = build_engine(expected.folder, drafter=OracleDrafter(expected), load=load)
    results = run(engine, [greedy(number, prompt) for number, prompt in enumerate(expected.prompts)])
    assert [results[number, 0].token_ids for number in range(len(expected.prompts))] == expected.outputs
    assert engine.scheduler.counters.num_steps < NUM_OUTPUT_TOKENS


@pytest.mark.parametrize("name", ["granite", "cohere2", "vaultgemma"])
def test_logprobs_are_those_of_a_full_forward_pass(root: Path, name: str) -> None:
    """These scale or cap their logits."""
    check_logprobs(golden(root, name), build_engine(root / name, chunk=7, overlap=True, load=load))
