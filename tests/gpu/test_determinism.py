"""A request gets the same ids and the same log-probabilities, bit for bit, whatever runs beside it."""

import random
from pathlib import Path

import pytest

from tests.checkpoints import VOCAB_SIZE
from tests.engine.test_golden import golden
from tests.gpu.harness import DEVICES, Entry, bits, start_engine
from weft.engine.kernels.cpu import library
from weft.engine.loop.engine import Engine
from weft.engine.wire.inputs import TokensInput
from weft.engine.wire.messages import AddRequest, EngineOptions, RequestOutput
from weft.engine.wire.params import SamplingParams

HAS_SETTING = "deterministic" in EngineOptions.__struct_fields__
WATCHED = 100_000
NUM_WATCHED = 2


def random_prompt(generator: random.Random, longest: int) -> list[int]:
    return generator.choices(range(4, VOCAB_SIZE), k=generator.randint(1, longest))


def watched_requests() -> list[AddRequest]:
    """A greedy one, and one that is sampled; the same each time, and nothing of them is left in the prefix cache."""
    prompt = random.Random(5).choices(range(4, VOCAB_SIZE), k=90)
    common = {"max_tokens": 16, "logprobs": 5, "ignore_eos": True, "prompt_logprobs": 2}
    greedy = SamplingParams(temperature=0, **common)  # type: ignore[arg-type]
    sampled = SamplingParams(temperature=1.0, top_p=0.9, top_k=40, seed=11, **common)  # type: ignore[arg-type]
    return [
        AddRequest(TokensInput(prompt), greedy, request_id=WATCHED),
        AddRequest(TokensInput(prompt[10:]), sampled, request_id=WATCHED + 1),
    ]


def observe(engine: Engine, num_neighbours: int) -> list[tuple[list[int], list[Entry], list[Entry]]]:
    """Run the watched requests in the middle of others; half of these are there before them."""
    generator = random.Random(num_neighbours)
    outputs: dict[int, RequestOutput] = {}

    def add_neighbours(first: int, last: int) -> None:
        for number in range(first, last):
            params = SamplingParams(
                temperature=generator.choice((0.0, 1.0)), max_tokens=generator.randint(8, 60), seed=number
            )
            engine.add(0, AddRequest(TokensInput(random_prompt(generator, 150)), params, request_id=number))

    add_neighbours(0, num_neighbours // 2)
    for _ in range(3):
        engine.step()
    for add in watched_requests():
        engine.add(0, add)
    add_neighbours(num_neighbours // 2, num_neighbours)
    while engine.has_work:
        for _, output in engine.step():
            if output.request_id in outputs:
                outputs[output.request_id].merge(output)
            else:
                outputs[output.request_id] = output
    watched = [outputs[WATCHED + index] for index in range(NUM_WATCHED)]
    return [(output.token_ids, bits(output.logprobs), bits(output.prompt_logprobs)) for output in watched]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["qwen3-wide", "mistral-wide"])
def test_neighbours_change_no_bit(golden_root: Path, name: str, device: str) -> None:
    if device == "cpu" and library.load() is None:
        pytest.skip("no native kernels on this machine")
    if device == "cuda" and not HAS_SETTING:
        pytest.skip("the engine has no setting deterministic")
    setting = {"deterministic": True} if HAS_SETTING else {}
    folder = golden(golden_root, name).folder
    engine = start_engine(
        folder, device, dtype="bfloat16", num_blocks=3000, max_num_seqs=160, prefix_caching=False, **setting
    )
    alone = observe(engine, 0)
    assert [len(token_ids) for token_ids, _, _ in alone] == [16] * NUM_WATCHED
    for num_neighbours in (7, 63, 127):
        assert observe(engine, num_neighbours) == alone, f"with {num_neighbours} neighbours"
