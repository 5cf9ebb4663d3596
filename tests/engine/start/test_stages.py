"""Pipeline stages of several processes, started as the engine starts them, and answer as transformers does."""

import io
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.architectures.checkpoints import write
from tests.engine.guidance.demo import DEMO_MODEL, PROMPT
from tests.engine.ranks.test_ranks import ForkedRank, answers, check_ids, keep_threads, options
from weft.engine.start import report
from weft.engine.start.startup import start
from weft.engine.wire.errors import ModelError

__all__ = ["keep_threads"]


@pytest.fixture(autouse=True)
def fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", ForkedRank)


@pytest.mark.parametrize(
    ("name", "num_ranks", "num_stages"),
    [
        ("llama", 1, 2),
        ("llama", 2, 2),
        ("gpt2", 1, 2),  # a tied embedding, learned positions
        ("gpt_oss", 1, 2),  # windows, experts
        ("qwen2_moe", 2, 2),
        ("qwen3_next", 1, 2),  # a stage without attention, and one without states
        ("recurrent_gemma", 1, 2),
        ("mamba", 1, 2),
    ],
)
def test_ids_are_those_of_transformers(tmp_path: Path, name: str, num_ranks: int, num_stages: int) -> None:
    check_ids(write(name, tmp_path), num_ranks, num_stages)


@pytest.mark.parametrize(
    "speculative", [None, "ngram", str(DEMO_MODEL / "draft")], ids=["none", "ngram", "draft model"]
)
def test_three_stages_answer_as_one_does(speculative: str | None) -> None:
    one, three = (
        start(options(DEMO_MODEL, 1, pipeline_parallel_size=size, speculative=speculative), "epoch") for size in (1, 3)
    )
    assert three.plan.weights_bytes < 0.5 * one.plan.weights_bytes
    assert three.plan.num_blocks > 2 * one.plan.num_blocks
    assert answers(three, [PROMPT]) == answers(one, [PROMPT])


def test_the_plan_is_that_of_the_largest_stage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plans = []
    for num_stages in (1, 2):
        text = msgspec.json.encode(options(DEMO_MODEL, 2, pipeline_parallel_size=num_stages))
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text)))
        assert report.main("plan") == 0
        plans.append(dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()))
    assert plans[1]["ranks"] == "4 in 2 stages; what follows is for the largest of them"
    weights = [float(plan["weights"].removesuffix(" MB")) for plan in plans]
    assert 0.5 <= weights[1] / weights[0] < 0.7


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"kv_offload_dir": "/blocks"}, "pipeline_parallel_size 2 does not go together with kv_offload_dir"),
        ({"task": "embed"}, "pipeline_parallel_size 2 does not go together with task embed"),
        ({"model_impl": "transformers"}, "pipeline_parallel_size needs a native family"),
    ],
)
def test_what_stages_cannot_do_is_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=f"^{message}"):
        start(options(DEMO_MODEL, 1, pipeline_parallel_size=2, **more), "epoch")
