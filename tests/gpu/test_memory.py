"""Out of memory is an answer, never the end: of a cache that cannot be, and of steps that do not fit."""

from pathlib import Path

import pytest
import torch

from tests.checkpoints import VOCAB_SIZE
from tests.engine.test_golden import Golden, golden, greedy, run
from tests.gpu.harness import DEVICES, start_engine
from weft.engine.batch import Batch
from weft.engine.loop.engine import Engine
from weft.engine.wire.errors import ModelError
from weft.engine.wire.inputs import TokensInput
from weft.engine.wire.messages import AddRequest, FinishReason
from weft.engine.wire.params import SamplingParams

NUM_LARGE = 24
SPARE_BYTES = 6 << 20
"""Left free beside the ballast: less than the allocator asks for at a time."""


@pytest.mark.parametrize("device", DEVICES)
def test_a_cache_far_too_large_is_refused(golden_root: Path, device: str) -> None:
    folder = golden(golden_root, "qwen3-wide").folder
    with pytest.raises(ModelError, match=r"kv_cache_memory is [\d,]+\.\d\d GB, but only .* are free"):
        start_engine(folder, device, kv_cache_memory=1 << 50)


def large_requests() -> list[AddRequest]:
    """Prompts that want thousands of tokens in a step."""
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=0)
    return [
        AddRequest(TokensInput([(number + i) % VOCAB_SIZE for i in range(240)]), params, request_id=1000 + number)
        for number in range(NUM_LARGE)
    ]


def reasons(engine: Engine) -> list[FinishReason | None]:
    """Ask for the large ones; why each of them ended."""
    return [output.finish_reason for output in run(engine, large_requests()).values()]


def check_answers(engine: Engine, expected: Golden) -> None:
    outputs = run(engine, [greedy(number, expected.prompts[number]) for number in range(4)])
    assert [outputs[number, 0].token_ids for number in range(4)] == expected.outputs[:4]


def test_requests_of_a_step_that_does_not_fit_end_and_the_next_is_answered(
    golden_root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL")
    expected = golden(golden_root, "qwen3-wide")
    engine = start_engine(expected.folder, "cpu")
    launch = engine._executor.launch

    def launch_if_small(batch: Batch, *arguments: object) -> object:
        if batch.num_tokens > 1000:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return launch(batch, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(engine._executor, "launch", launch_if_small)
    found = reasons(engine)
    assert len(found) == NUM_LARGE
    assert FinishReason.ERROR in found
    check_answers(engine, expected)


@pytest.mark.gpu
def test_a_device_that_others_have_filled_is_survived(golden_root: Path) -> None:
    """Every request ends, in whatever way; once there is memory again, answers are right."""
    expected = golden(golden_root, "qwen3-wide")
    engine = start_engine(expected.folder, "cuda")
    check_answers(engine, expected)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    ballast = []
    size = torch.cuda.mem_get_info()[0] - SPARE_BYTES
    while size > SPARE_BYTES:
        try:
            ballast.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            size //= 2
        size = min(size, torch.cuda.mem_get_info()[0] - SPARE_BYTES)
    assert len(reasons(engine)) == NUM_LARGE
    ballast.clear()
    torch.cuda.empty_cache()
    check_answers(engine, expected)
    assert reasons(engine) == [FinishReason.LENGTH] * NUM_LARGE
