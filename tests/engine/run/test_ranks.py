"""Several processes compute a model together, started as the engine starts them, and answer as transformers does."""

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.architectures.checkpoints import NUM_OUTPUT_TOKENS, golden, write
from tests.engine.guidance.demo import DEMO_MODEL, PROMPT
from tests.engine.step.test_executor import REQUESTS, outputs
from tests.engine.test_golden import greedy, run
from weft.engine.kernels.cpu import library
from weft.engine.run import print_plan
from weft.engine.run.ranks import RankedRunner
from weft.engine.run.startup import Started, start
from weft.engine.shared.errors import ModelError
from weft.engine.shared.messages import EngineOptions


@pytest.fixture(autouse=True)
def keep_threads() -> Any:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


def options(folder: Path, num_ranks: int, **more: Any) -> EngineOptions:
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_memory": 8 << 20} | more
    return EngineOptions(model=str(folder), tensor_parallel_size=num_ranks, max_model_len=256, **settings)


def answers(started: Started, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy ids, in chunks of prompts beside decodes; the other ranks end."""
    outputs = run(started.engine, [greedy(index, prompt) for index, prompt in enumerate(prompts)])
    executor = started.engine._executor
    if isinstance(executor, RankedRunner):
        executor.close()
    return [list(outputs[index, 0].token_ids)[:NUM_OUTPUT_TOKENS] for index in range(len(prompts))]


@pytest.mark.parametrize(
    ("name", "num_ranks", "changes"),
    [
        pytest.param("llama", 2, {"num_key_value_heads": 1}, id="one K/V head"),
        pytest.param("llama", 4, {}, id="four ranks", marks=pytest.mark.slow),
        pytest.param("gpt_oss", 2, {}, id="sinks, windows and experts with biases"),
        pytest.param("qwen2_moe", 2, {}, id="a shared expert"),
    ],
)
def test_ids_are_those_of_transformers(tmp_path: Path, name: str, num_ranks: int, changes: dict[str, Any]) -> None:
    expected = golden(write(name, tmp_path, changes))
    started = start(options(tmp_path, num_ranks, max_num_seqs=4, block_size=8, max_num_batched_tokens=16), "epoch")
    assert started.info.device.endswith(f", {num_ranks} ranks")
    found = answers(started, expected.prompts)
    assert [ids[: len(output)] for ids, output in zip(found, expected.outputs, strict=True)] == expected.outputs


def test_choices_grammars_drafts_and_sampling_are_those_of_one_rank() -> None:
    found = []
    for num_ranks in (1, 2):
        engine = start(
            options(DEMO_MODEL, num_ranks, max_num_batched_tokens=64, max_num_seqs=4, speculative="ngram"), "epoch"
        ).engine
        gained = outputs(engine, REQUESTS)  # type: ignore[arg-type]
        found.append({key: [i for i in entries if isinstance(i, int)] for key, entries in gained.items()})
        if isinstance(engine._executor, RankedRunner):
            engine._executor.close()
    assert found[0] == found[1]


@pytest.mark.skipif(library.load() is None, reason="no native kernels on this machine")
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_native_kernels_compute_the_parts(quantization: str) -> None:
    one, two = (
        start(options(DEMO_MODEL, size, dtype="bfloat16", quantization=quantization), "epoch") for size in (1, 2)
    )
    assert two.plan.weights_bytes < 0.8 * one.plan.weights_bytes  # embedding and head are whole
    assert two.plan.num_blocks > 1.5 * one.plan.num_blocks
    assert answers(two, [PROMPT]) == answers(one, [PROMPT])


def test_the_plan_is_that_of_each_rank(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    weights = []
    for num_ranks in (1, 2):
        text = msgspec.json.encode(options(DEMO_MODEL, num_ranks))
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text)))
        assert print_plan.main() == 0
        plan = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
        assert plan.get("ranks") == (None if num_ranks == 1 else "2; what follows is for each of them")
        weights.append(float(plan["weights"].removesuffix(" MB")))
    assert 0.5 < weights[1] / weights[0] < 0.7  # embedding and head are whole


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"speculative": "/draft"}, "a draft model"),
        ({"kv_offload_dir": "/blocks"}, "kv_offload"),
        ({"deterministic": True}, "deterministic"),
        ({"task": "embed"}, "task embed"),
    ],
)
def test_what_ranks_cannot_do_yet_is_refused(
    more: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`weft plan` made a plan for vectors of several ranks, which could not be started."""
    with pytest.raises(ModelError, match=f"^tensor_parallel_size 2 does not go together with {reason}") as refused:
        start(options(DEMO_MODEL, 2, **more), "epoch")
    text = msgspec.json.encode(options(DEMO_MODEL, 2, **more))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text)))
    assert print_plan.main() == 2
    assert capsys.readouterr().err == f"weft: error: {refused.value}\n"


def test_modules_of_transformers_are_refused() -> None:
    with pytest.raises(ModelError, match=r"^tensor_parallel_size needs a native family"):
        start(options(DEMO_MODEL, 2, model_impl="transformers"), "epoch")


def test_a_rank_whose_engine_is_gone_ends() -> None:
    """While it imported torch; it loaded its part, and waited for the others for a day."""
    command = [sys.executable, "-m", "weft.engine.run.rank_process", "0", "1"]
    assert subprocess.run(command, stdin=subprocess.DEVNULL, timeout=300).returncode == 1
