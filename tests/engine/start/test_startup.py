"""Start-up and `weft plan` on a tiny checkpoint."""

import io
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from tests.engine.recording import RecordedCapture, StaticBackend
from tests.engine.requests_for_tests import add_request
from weft import server
from weft.engine import config as engine_config
from weft.engine.batch import Batch, StepResult
from weft.engine.cache.specs import CacheGroup, CacheSpec, paged_groups
from weft.engine.config import EngineConfig
from weft.engine.kernels.cpu import library
from weft.engine.kernels.torch.caches import Caches
from weft.engine.layers.block import Decoder
from weft.engine.loop.engine import Engine
from weft.engine.models import loading
from weft.engine.runner.cuda_graphs import StepGraphs
from weft.engine.runner.model_runner import LaunchedStep
from weft.engine.start import model_choice, startup, warm_up
from weft.engine.start import report as plan
from weft.engine.start.startup import start
from weft.engine.tune import compare as settle
from weft.engine.wire.errors import ModelError
from weft.engine.wire.machine import ModelMemory
from weft.engine.wire.messages import EngineOptions

DEMO = Path(server.__file__).parent / "demo_model"


def tell(monkeypatch: pytest.MonkeyPatch, options: EngineOptions) -> None:
    """Put the options on standard input, as the supervisor does."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(msgspec.json.encode(options))))


@pytest.fixture(autouse=True)
def keep_torch_as_it_is() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)
    torch.set_grad_enabled(True)


@pytest.mark.parametrize(
    ("dtype", "quantization", "speculative"),
    [
        ("bfloat16", "none", None),
        ("float32", "none", "qwen2-dialect4"),
        ("bfloat16", "int8", None),
        ("float32", "none", "ngram"),
    ],
)
def test_the_plan_before_loading_is_the_one_that_is_served(
    checkpoint_folder: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    quantization: str,
    speculative: str | None,
) -> None:
    """A tied head that is packed was left out by `weft plan`, and the engine did not set activations aside."""
    if quantization == "int8" and library.load() is None:
        pytest.skip("no native kernels on this machine")
    free_bytes = 60_000_000
    folder = checkpoint_folder("qwen3") if quantization == "none" else DEMO
    if speculative == "qwen2-dialect4":
        speculative = str(checkpoint_folder(speculative))
    options = EngineOptions(
        model=str(folder),
        device="cpu",
        dtype=dtype,
        quantization=quantization,
        max_num_seqs=64,
        speculative=speculative,
    )
    tell(monkeypatch, options)
    monkeypatch.setattr(engine_config, "available_memory_bytes", lambda device: free_bytes)
    assert plan.main("plan") == 0
    said = capsys.readouterr().out.splitlines()

    def load(*args: Any, **options: Any) -> Decoder:
        nonlocal free_bytes
        model = loading.load_weights(*args, **options)
        free_bytes -= model.weights_bytes
        return model

    monkeypatch.setattr(model_choice, "load_weights", load)
    assert said[-4:-1] == start(options, "epoch").plan.lines()


def test_the_memory_of_several_models_is_told_in_one_answer(
    checkpoint_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """One that does not fit alone is no fault there; the least cache is that of the context asked for."""
    folder = str(checkpoint_folder("qwen3"))
    given = EngineOptions(model=folder, device="cpu", dtype="float32", max_num_seqs=2, max_num_batched_tokens=64)
    changes: list[dict[str, Any]] = [
        {},
        {"max_model_len": 128},
        {"kv_cache_memory": 1 << 40},
        {"tensor_parallel_size": 2},
        {"model": str(tmp_path)},
    ]
    options = msgspec.json.encode([msgspec.structs.replace(given, **each) for each in changes])
    command = [sys.executable, "-m", "weft.engine.start.report", "memory"]
    told = subprocess.run(command, input=options, stdout=subprocess.PIPE, check=True, timeout=300).stdout
    free, longer, fixed, ranks, missing = msgspec.json.decode(told, type=list[ModelMemory])
    assert free.weights_bytes == start(given, "epoch").plan.weights_bytes
    assert free.free_bytes > 1 << 28 and free.device == "cpu" and free.num_requests == 2
    block_bytes = longer.least_kv_bytes - free.least_kv_bytes  # 128 tokens instead of those of a step, in blocks of 32
    assert free.least_kv_bytes == 3 * block_bytes / 2
    assert fixed.is_kv_fixed and fixed.kv_bytes == 1 << 40
    assert free.weights_bytes < ranks.weights_bytes < 2 * free.weights_bytes and ranks.num_sharing == 2
    assert missing.fault == f"{tmp_path}: no config.json"


def test_a_model_that_does_not_fit_is_refused_before_it_is_loaded(
    checkpoint_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights were loaded all the same, until the kernel ended the engine, which was started again for ever."""
    folder = checkpoint_folder("qwen3")
    options = EngineOptions(model=str(folder), device="cpu", dtype="float32", load_format="dummy")
    monkeypatch.setattr(engine_config, "available_memory_bytes", lambda device: 300_000)
    monkeypatch.delattr(model_choice, "load_weights")
    with pytest.raises(ModelError, match=r"does not fit: weights take 289 kB and .* but only 300 kB are free"):
        start(options, "epoch")
    tell(monkeypatch, options)
    assert plan.main("plan") == 2


def test_a_draft_model_takes_its_part_of_the_memory(checkpoint_folder: Callable[[str], Path]) -> None:
    """Of the same cache memory it gets a share, and its weights count."""

    def started(speculative: str | None) -> startup.Started:
        options = EngineOptions(
            model=str(checkpoint_folder("qwen3")),
            device="cpu",
            dtype="float32",
            kv_cache_memory=3_000_000,
            speculative=speculative,
        )
        return start(options, "epoch")

    alone, itself = started(None).plan, started(str(checkpoint_folder("qwen3"))).plan
    assert itself.weights_bytes == 2 * alone.weights_bytes
    assert itself.num_blocks == alone.num_blocks // 2


def test_a_draft_model_that_does_not_fit_is_refused(
    checkpoint_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(checkpoint_folder("qwen3"))
    options = EngineOptions(model=folder, device="cpu", dtype="float32", max_num_seqs=4, max_num_batched_tokens=64)
    monkeypatch.setattr(engine_config, "available_memory_bytes", lambda device: 600_000)
    assert start(options, "epoch").plan.weights_bytes < 300_000
    with pytest.raises(ModelError, match="does not fit: weights take 5"):
        start(msgspec.structs.replace(options, speculative=folder), "epoch")


def test_a_tiny_cache_is_enough_to_start_and_to_serve(checkpoint_folder: Callable[[str], Path]) -> None:
    """The warm-up wrote behind the end of a cache that holds fewer tokens than its longest step."""
    options = EngineOptions(
        model=str(checkpoint_folder("qwen3-windows")),
        device="cpu",
        dtype="float32",
        block_size=16,
        kv_cache_memory=50_000,
    )
    started = start(options, "epoch")
    assert started.info.max_model_len == started.plan.num_tokens == 48
    for request_id in range(6):
        started.engine.add(0, add_request([7] * (8 + request_id), request_id, max_tokens=30))
    num_finished = 0
    while started.engine.has_work:
        num_finished += sum(output.finish_reason is not None for _, output in started.engine.step())
        started.engine.scheduler.check_integrity()
    assert num_finished == 6


class CrowdedRunner:
    """Another program has the second core, so that two threads take longer than one, on a clock of its own."""

    num_threads = 0
    now = 0.0
    pays_off = False
    """Whether rows, not the threads' meeting, take the time."""

    def __init__(self, *parts: object) -> None:
        pass

    def check_device(self) -> None:
        pass

    def launch(self, batch: Batch) -> None:
        CrowdedRunner.now += (
            0.002 * self.num_threads + 0.001 * len(batch.row_indices) / self.num_threads * self.pays_off
        )

    def collect(self, launched: None) -> StepResult:
        return StepResult([], {}, [])


@pytest.fixture
def two_crowded_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(startup, "ModelRunner", CrowdedRunner)
    for module in (warm_up, settle):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: CrowdedRunner.now))
    monkeypatch.setattr(
        startup, "set_num_threads", lambda kernels, backend, sampler, n: setattr(CrowdedRunner, "num_threads", n)
    )
    torch.set_num_threads(2)


@pytest.mark.usefixtures("two_crowded_threads")
@pytest.mark.parametrize(("small_model_bytes", "num_threads"), [(1 << 30, 1), (1, 2)])
def test_only_a_small_model_may_be_left_with_one_thread(
    checkpoint_folder: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    small_model_bytes: int,
    num_threads: int,
) -> None:
    """Load on the machine while a large model warmed up left it with one thread, half as fast, for ever."""
    monkeypatch.setattr(warm_up, "_SMALL_MODEL_BYTES", small_model_bytes)
    started = start(EngineOptions(model=str(checkpoint_folder("qwen3")), device="cpu"), "epoch")
    assert num_threads == CrowdedRunner.num_threads
    assert started.info.device == f"cpu ({num_threads} threads)"


@pytest.mark.usefixtures("two_crowded_threads")
@pytest.mark.parametrize(("max_num_seqs", "num_threads"), [(None, 2), (1, 1)])
def test_threads_are_chosen_by_a_step_of_as_many_rows_as_there_may_be(
    checkpoint_folder: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    max_num_seqs: int | None,
    num_threads: int,
) -> None:
    monkeypatch.setattr(CrowdedRunner, "pays_off", True)
    options = EngineOptions(model=str(checkpoint_folder("qwen3")), device="cpu", max_num_seqs=max_num_seqs)
    assert start(options, "epoch").info.device == f"cpu ({num_threads} threads)"


def test_graphs_are_recorded_before_the_engine_is_ready(
    checkpoint_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And the draft model's; requests are then answered as without."""
    folder = str(checkpoint_folder("qwen3"))
    options = EngineOptions(
        model=folder,
        device="cpu",
        dtype="float32",
        max_num_seqs=2,
        max_num_batched_tokens=34,
        kv_cache_memory=400_000,
        speculative=folder,
    )

    def answer(engine: Engine[LaunchedStep]) -> list[int]:
        engine.add(0, add_request([7] * 20, max_tokens=12, temperature=0.0, ignore_eos=True))
        token_ids: list[int] = []
        while engine.has_work:
            token_ids += [i for _, output in engine.step() for i in output.token_ids]
        return token_ids

    plain = answer(start(options, "epoch").engine)
    monkeypatch.setattr(startup, "StepGraphs", partial(StepGraphs, make_capture=RecordedCapture))
    monkeypatch.setattr(startup, "make_caches", static_caches)
    monkeypatch.setattr(warm_up, "_RECORDING_S", 60.0)
    caplog.set_level("INFO")
    engine = start(options, "epoch").engine
    assert not engine._executor.prepare(), "nothing is left to record"
    # Of 1, 2, 4, 8, 16, 24, 32 and 34 tokens; and of 1 and 2 that are sampled, behind which nothing is launched.
    assert "recorded 10 of 10 CUDA graphs in" in caplog.text
    monkeypatch.setattr(Decoder, "forward", lambda *arguments: pytest.fail("a step is not a graph"))
    assert len(plain) == 12 and answer(engine) == plain


def static_caches(
    groups: tuple[CacheGroup[CacheSpec], ...],
    num_blocks: int,
    config: EngineConfig,
    num_heads: int,
    num_states: int | None = None,
    scales: Mapping[int, torch.Tensor] | None = None,
) -> Caches:
    return Caches(StaticBackend(paged_groups(groups), num_blocks, config.block_size, config.max_num_batched_tokens))


@pytest.mark.parametrize(("num_left", "expected"), [(100, 6), (3, 3)])
def test_recording_ends_when_its_time_is_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, num_left: int, expected: int
) -> None:
    clock = SimpleNamespace(now=0.0, num_recorded=0)

    def prepare() -> bool:
        clock.now += warm_up._RECORDING_S / 6
        clock.num_recorded += 1
        return bool(clock.num_recorded < num_left)

    monkeypatch.setattr(warm_up, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    caplog.set_level("INFO")
    graphs = SimpleNamespace(progress=(expected, 100))
    warm_up.record_graphs(SimpleNamespace(prepare=prepare), graphs)  # type: ignore[arg-type]
    assert clock.num_recorded == expected
    assert f"recorded {expected} of 100 CUDA graphs in" in caplog.text
