"""Greedy output of tiny random float32 checkpoints equals transformers' generate, id for id.

Over every family in both dialects, and a pairwise cover of batch size, block size, prefill chunk, prefix cache,
preemption, choices and overlap. The prompts are chosen so that the best id is clearly best at every position; so a
difference is a fault, not rounding.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.checkpoints import CHECKPOINTS, VOCAB_SIZE, WIDE_CHECKPOINTS, load_reference, write_checkpoint
from weft.engine.cache.manager import KVCacheManager
from weft.engine.cache.specs import group_layers, paged_groups
from weft.engine.describe.config import ModelFacts, load_model_config
from weft.engine.kernels.torch.caches import Caches
from weft.engine.kernels.torch.encoder_step import EncoderCaches
from weft.engine.kernels.torch.layer_kernels import TorchKernels
from weft.engine.kernels.torch.sdpa import SdpaBackend
from weft.engine.layers.block import LoadedModel
from weft.engine.loop.engine import Engine
from weft.engine.models.loading import load_weights
from weft.engine.request import Request
from weft.engine.runner.model_runner import ModelRunner
from weft.engine.schedule.scheduler import ScheduledStep, Scheduler
from weft.engine.schedule.step_cost import StepCostModel
from weft.engine.start.vector_model import read_alignment
from weft.engine.wire.inputs import InputLimits, TokensInput
from weft.engine.wire.messages import AddRequest, RequestOutput, TokenLogprobs
from weft.engine.wire.params import SamplingParams

NUM_PROMPTS = 16
NUM_OUTPUT_TOKENS = 10
MIN_GAP = 2e-3
CPU = torch.device("cpu")

FACTORS: dict[str, Sequence[object]] = {
    "batch": (1, 5, 16),
    "block_size": (8, 16, 32),
    "chunk": (1, 7, 64, 4096),
    "prefix": ("miss", "hit", "in flight"),
    "preempts": (False, True),
    "num_choices": (1, 3),
    "overlap": (False, True),
}


@dataclass(frozen=True)
class Golden:
    """Prompts and what transformers answers."""

    folder: Path
    prompts: list[list[int]]
    outputs: list[list[int]]


def pairwise_cover() -> list[dict[str, object]]:
    """Rows so that every pair of values of two factors occurs in one: greedy, over seeded candidates."""
    names = list(FACTORS)
    missing = {(a, x, b, y) for a, b in itertools.combinations(names, 2) for x in FACTORS[a] for y in FACTORS[b]}
    generator = random.Random(0)
    rows = []
    while missing:
        candidates = [{name: generator.choice(FACTORS[name]) for name in names} for _ in range(60)]
        best = max(candidates, key=lambda row: sum(row[a] == x and row[b] == y for a, x, b, y in missing))
        covered = {(a, x, b, y) for a, x, b, y in missing if best[a] == x and best[b] == y}
        if covered:
            rows.append(best)
            missing -= covered
    return rows


ROWS = pairwise_cover()
FULLY_COVERED = ("llama3", "mistral", "qwen2", "qwen3-windows", "gemma2")
CASES = [
    (name, index)
    for number, name in enumerate(CHECKPOINTS)
    for index in range(len(ROWS))
    if name in FULLY_COVERED or index % len(CHECKPOINTS) == number
]


@pytest.fixture(scope="session")
def golden_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("golden")


@cache
def golden(root: Path, name: str) -> Golden:
    folder = root / name
    write_checkpoint((CHECKPOINTS | WIDE_CHECKPOINTS)[name], folder)
    return answer(folder)


def answer(folder: Path) -> Golden:
    """Prompts in two families of prefixes, answered by transformers; only those with clear answers are kept."""
    model = load_reference(folder)
    generator = random.Random(7)
    prefix = [generator.randrange(4, VOCAB_SIZE) for _ in range(40)]
    prompts: list[list[int]] = []
    outputs: list[list[int]] = []
    for _ in range(8 * NUM_PROMPTS):
        if len(prompts) == NUM_PROMPTS:
            break
        tail = [generator.randrange(4, VOCAB_SIZE) for _ in range(generator.randrange(1, 30))]
        prompt = (prefix if len(prompts) % 2 else prefix[:24]) + tail
        with torch.no_grad():
            answer = model.generate(  # type: ignore[operator]
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                do_sample=False,
                max_new_tokens=NUM_OUTPUT_TOKENS,
                pad_token_id=0,
                output_scores=True,
                return_dict_in_generate=True,
            )
        best = torch.stack(answer.scores).topk(2).values  # (num_output_tokens, 1, 2)
        if (best[..., 0] - best[..., 1]).min() > MIN_GAP:
            prompts.append(prompt)
            outputs.append(answer.sequences[0, len(prompt) :].tolist())
    assert len(prompts) == NUM_PROMPTS, "too few prompts with clear answers"
    assert len({tuple(output) for output in outputs}) > NUM_PROMPTS // 2, "the model answers everything alike"
    return Golden(folder, prompts, outputs)


class PreemptingScheduler(Scheduler):
    """Admits whatever fits at the moment, and takes every request but the oldest out of the running once.

    A request may have been launched and not collected when it is preempted, or have computed a part of its prompt.
    """

    _num_calls = 0

    def schedule(self) -> ScheduledStep | None:
        self._num_calls += 1
        once = [request for request in self.running[1:] if not request.num_preemptions]
        if once and self._num_calls % 2:
            self._preempt(once[-1])
        return super().schedule()

    def _expected_growth(self, request: Request) -> int:
        return 0


def load_native(folder: Path) -> tuple[ModelFacts, LoadedModel]:
    config = load_model_config(folder)
    return config, load_weights(folder, config, TorchKernels(), device=CPU, dtype=torch.float32, max_model_len=256)


def build_engine(
    folder: Path,
    *,
    block_size: int = 16,
    num_blocks: int = 400,
    chunk: int = 4096,
    overlap: bool = False,
    drafter: object = None,
    scheduler_type: type[Scheduler] = Scheduler,
    load: Callable[[Path], tuple[ModelFacts, LoadedModel]] = load_native,
) -> Engine:
    config, model = load(folder)
    groups = group_layers(model.cache_specs)
    paged, max_input = paged_groups(groups), config.num_input_tokens
    encoder = EncoderCaches(block_size, CPU) if max_input else None
    caches = Caches(SdpaBackend(paged, num_blocks, block_size, torch.float32, CPU), encoder=encoder)
    scheduler = scheduler_type(
        KVCacheManager(num_blocks, block_size, [group.spec for group in groups]),
        StepCostModel(),
        max_num_seqs=64,
        max_num_batched_tokens=chunk,
        itl_target_s=10.0,
    )
    return Engine(
        scheduler,
        ModelRunner(model, caches, CPU),
        vocab_size=config.vocab_size,
        max_model_len=min(256, (num_blocks - 1) * block_size),
        max_num_waiting=100,
        input_limits=InputLimits(max_input, config.max_position_embeddings, config.audio),
        eos_token_ids=config.eos_token_ids,
        overlap=overlap,
        drafters=(drafter,) if drafter else (),  # type: ignore[arg-type]
        vectors=read_alignment(folder, config),
    )


def run(engine: Engine, adds: list[AddRequest]) -> dict[tuple[int, int], RequestOutput]:
    """Run the requests to their end; returns what each choice gained, by request and index."""
    results: dict[tuple[int, int], RequestOutput] = {}
    for add in adds:
        engine.add(0, add)
    while engine.has_work:
        for _, output in engine.step():
            key = (output.request_id, output.index)
            if key in results:
                results[key].merge(output)
            else:
                results[key] = output
        engine.scheduler.check_integrity()
    return results


def greedy(request_id: int, prompt: list[int], num_choices: int = 1, **params: object) -> AddRequest:
    sampling = SamplingParams(temperature=0, max_tokens=NUM_OUTPUT_TOKENS, **params)  # type: ignore[arg-type]
    return AddRequest(TokensInput(prompt), sampling, num_choices=num_choices, request_id=request_id)


@pytest.mark.parametrize(("name", "row"), CASES)
def test_greedy_ids_are_those_of_transformers(golden_root: Path, name: str, row: int) -> None:
    """Every row does what it says: the rows that preempt never did, since admission foresaw what would not fit."""
    expected = golden(golden_root, name)
    factors = ROWS[row]
    block_size, batch = int(str(factors["block_size"])), int(str(factors["batch"]))
    num_choices = int(str(factors["num_choices"]))
    longest = max(map(len, expected.prompts)) + NUM_OUTPUT_TOKENS
    engine = build_engine(
        expected.folder,
        block_size=block_size,
        num_blocks=-(-longest // block_size) + 3 if factors["preempts"] else 600,
        chunk=int(str(factors["chunk"])),
        overlap=bool(factors["overlap"]),
        scheduler_type=PreemptingScheduler if factors["preempts"] else Scheduler,
    )
    # Odd prompts share their first 40 tokens with each other, and the first 24 with the even ones.
    numbers = range(batch) if factors["prefix"] == "in flight" else range(NUM_PROMPTS)[-batch:]
    if factors["prefix"] == "hit":
        run(engine, [greedy(1000, expected.prompts[0]), greedy(1001, expected.prompts[1])])
    counters = engine.scheduler.counters
    num_hits_before = counters.prefix_cache_hits
    adds = [
        AddRequest(
            TokensInput(expected.prompts[number]),
            SamplingParams(temperature=0, max_tokens=NUM_OUTPUT_TOKENS),
            num_choices=num_choices,
            cache_salt=str(number) if factors["prefix"] == "miss" else "",
            request_id=number,
        )
        for number in numbers
    ]
    results = run(engine, adds)
    for number in numbers:
        for index in range(num_choices):
            assert results[number, index].token_ids == expected.outputs[number]
    is_shared = factors["prefix"] == "hit" or (factors["prefix"] == "in flight" and batch > 1)
    assert (counters.prefix_cache_hits > num_hits_before) == is_shared
    is_contended = bool(factors["preempts"]) and batch * num_choices > 1
    assert (counters.num_preemptions > 0) == is_contended


class OracleDrafter:
    """Guesses what transformers says, and now and then something else."""

    def __init__(self, expected: Golden) -> None:
        self._answers = {
            tuple(prompt): output for prompt, output in zip(expected.prompts, expected.outputs, strict=True)
        }

    def propose(self, request: Request) -> list[int]:
        answer = self._answers[tuple(request.prompt_token_ids)]
        done = len(request.token_ids) - request.num_prompt_tokens
        draft = answer[done : done + 3]
        return [*draft[:-1], 0] if done % 4 == 1 else draft


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", FULLY_COVERED)
def test_drafts_change_nothing_but_the_number_of_steps(golden_root: Path, name: str, overlap: bool) -> None:
    expected = golden(golden_root, name)
    adds = [greedy(number, prompt) for number, prompt in enumerate(expected.prompts)]
    engine = build_engine(expected.folder, drafter=OracleDrafter(expected), overlap=overlap)
    results = run(engine, adds)
    assert [results[number, 0].token_ids for number in range(NUM_PROMPTS)] == expected.outputs
    # With overlap a request whose drafts are being verified sits out every second step.
    assert engine.scheduler.counters.num_steps < NUM_OUTPUT_TOKENS + overlap


@pytest.mark.parametrize("chunk", [7, 4096])
@pytest.mark.parametrize("name", list(CHECKPOINTS))
def test_logprobs_are_those_of_a_full_forward_pass(golden_root: Path, name: str, chunk: int) -> None:
    expected = golden(golden_root, name)
    check_logprobs(expected, build_engine(expected.folder, chunk=chunk, overlap=chunk == 7))


def check_logprobs(expected: Golden, engine: Engine) -> None:
    adds = [
        greedy(number, expected.prompts[number], logprobs=5, prompt_logprobs=3, presence_penalty=0.0)
        for number in range(4)
    ]
    results = run(engine, adds)
    model = load_reference(expected.folder)
    for number in range(4):
        prompt, output = expected.prompts[number], results[number, 0]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + output.token_ids])).logits[0]
        logprobs = torch.log_softmax(logits.double(), -1)
        reported = [*(output.prompt_logprobs or []), *(output.logprobs or [])]
        assert len(reported) == len(prompt) + len(output.token_ids) - 1
        for position, entry in enumerate(reported):
            check_entry(entry, logprobs[position], (prompt + output.token_ids)[position + 1])


def check_entry(entry: TokenLogprobs, logprobs: torch.Tensor, token_id: int) -> None:
    assert entry.logprob == pytest.approx(float(logprobs[token_id]), abs=1e-4)
    best = logprobs.topk(len(entry.top_logprobs))
    assert entry.top_logprobs == pytest.approx(best.values.tolist(), abs=1e-4)
    for token, logprob in zip(entry.top_token_ids, entry.top_logprobs, strict=True):
        assert logprob == pytest.approx(float(logprobs[token]), abs=1e-4)
