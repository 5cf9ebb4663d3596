"""No step waits for the device but where its results are collected: torch refuses whatever would wait."""

from pathlib import Path

import pytest
import torch

import server
from engine.protocol import EngineOptions
from engine.startup import start
from tests.engine.requests_for_tests import add_request

pytestmark = pytest.mark.gpu
DEMO = Path(server.__file__).parent / "demo_model"


def test_no_step_waits_for_the_device() -> None:
    """Prefill and decode, in graphs and beside them, with every kind of sampling."""
    engine = start(EngineOptions(model=str(DEMO), device="cuda", dtype="bfloat16"), "epoch").engine
    kinds: list[dict[str, object]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
        {"temperature": 0.7, "logprobs": 3, "logit_bias": {5: 2.0}},
        {"temperature": 0.0, "frequency_penalty": 0.5, "repetition_penalty": 1.1, "bad_words_token_ids": ((4, 5),)},
    ]

    def run(first_id: int) -> int:
        """Steps until all is answered; requests arrive while others decode."""
        num_steps = 0
        for request_id, kind in enumerate(kinds * 2, first_id):
            engine.add(0, add_request([request_id % 90 + 3] * 40, request_id, max_tokens=40, ignore_eos=True, **kind))
            for _ in range(5):
                assert all(output.message is None for _, output in engine.step())
                num_steps += 1
        while engine.has_work:
            assert all(output.message is None for _, output in engine.step())
            num_steps += 1
        return num_steps

    run(0)  # compiles kernels
    while engine.prepare(60.0) is not None:  # records graphs, which may wait
        pass
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert run(100) > 40
    finally:
        torch.cuda.set_sync_debug_mode("default")
