"""No step waits for the device but where its results are collected: torch refuses whatever would wait."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.engine.guidance.demo import json_grammar
from tests.engine.requests_for_tests import add_request
from tests.gpu.harness import DEVICES, KINDS
from weft import server
from weft.engine.loop.engine import Engine
from weft.engine.start.startup import start
from weft.engine.wire.messages import EngineOptions, Guidance

DEMO = Path(server.__file__).parent / "demo_model"
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 20}}, "required": ["name"]}


def answer(engine: Engine, first_id: int) -> Counter[tuple[int, int]]:
    """How many ids each choice of each request got; requests arrive while others decode."""
    num_ids: Counter[tuple[int, int]] = Counter()

    def step() -> None:
        for _, output in engine.step():
            assert output.message is None
            num_ids[output.request_id, output.index] += len(output.token_ids)

    for request_id, kind in enumerate(KINDS * 2, first_id):
        prompt = [request_id % 90 + 3] * 40
        engine.add(0, add_request(prompt, request_id, max_tokens=40, ignore_eos=True, seed=request_id, **kind))
        for _ in range(5):
            step()
    guided = add_request([5] * 40, first_id + len(KINDS) * 2, max_tokens=40, temperature=0.0)
    engine.add(0, msgspec.structs.replace(guided, guidance=Guidance(grammar=json_grammar(SCHEMA))))
    while engine.has_work or engine.pending.grammars:
        assert not [compiled for compiled in engine.take_ready() if compiled.fault is not None]
        step()
    return num_ids


@contextlib.contextmanager
def refusing_to_wait() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [{}, {"deterministic": True}, {"speculative": "ngram"}], ids=str)
def test_no_step_waits_for_the_device(options: dict[str, Any], device: str) -> None:
    """Prefill and decode, in graphs and beside them, with every kind of sampling."""
    engine = start(EngineOptions(model=str(DEMO), device=device, dtype="bfloat16", **options), "epoch").engine
    answer(engine, 0)  # compiles kernels
    while engine.prepare(60.0) is not None:  # records graphs, which may wait
        pass
    with refusing_to_wait() if device == "cuda" else contextlib.nullcontext():
        num_ids = answer(engine, 100)
    *others, guided = [num_ids[key] for key in sorted(num_ids)]
    assert others == [40] * sum(kind.get("num_choices", 1) for kind in KINDS * 2)
    assert guided > 0
