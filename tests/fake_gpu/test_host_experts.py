"""Experts in host memory beside a GPU that is not there: what is copied, what is planned, and what is said."""

import io
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.checkpoints import Checkpoint, write_config
from tests.engine.requests_for_tests import add_request
from tests.fake_gpu.engines import Warm
from tests.fake_gpu.gpu import FakeGpu
from weft.engine import config as engine_config
from weft.engine.kernels.host_experts import HostExperts
from weft.engine.layers.block import Decoder, PreNormBlock
from weft.engine.layers.feed_forward import ExpertLayer
from weft.engine.start import report, startup
from weft.engine.start.sizes import Sizes, find_sizes
from weft.engine.wire.messages import EngineOptions

MIXTURE = Checkpoint(
    "deepseek_v3",
    {
        "num_hidden_layers": 5,
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 64,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 512,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
)
"""Four layers whose experts are most of the weights, each with a shared expert, behind a dense one."""

EXPERTS_BYTES = 64 * 3 * 512 * 48 * 2
"""Of a layer: experts, matrices, their sizes, bytes of a bfloat16."""

LIMITS: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "dtype": "bfloat16"}


def hosted(warm: Warm) -> list[bool]:
    """Of each layer with experts whether these are in host memory."""
    model: Decoder = warm.engine._executor._model  # type: ignore[attr-defined]
    layers = [block.feed_forward for block in model.blocks if isinstance(block, PreNormBlock)]
    experts = [layer.experts for layer in layers if isinstance(layer, ExpertLayer)]
    return [isinstance(each, HostExperts) for each in experts]


def copies_of_a_step(warm: Warm, num_requests: int) -> int:
    """Copies from and to the host of a step in which so many requests decode."""
    with warm.gpu:
        for number in range(num_requests):
            warm.engine.add(0, add_request([5] * 20, number, max_tokens=8, ignore_eos=True, temperature=0))
        counts = []
        while warm.engine.has_work:
            before = warm.gpu.launches["copy from or to the host"]
            warm.engine.step()
            counts.append(warm.gpu.launches["copy from or to the host"] - before)
    return counts[-3]


@pytest.fixture(scope="module")
def free_bytes(tmp_path_factory: pytest.TempPathFactory) -> int:
    """A GPU on which the experts of two of the four layers have room."""
    folder = write_config(MIXTURE, tmp_path_factory.mktemp("shape"))
    options = EngineOptions(model=str(folder), device="cuda", load_format="dummy", **LIMITS)
    with FakeGpu(compiles=False):
        needed_bytes = report._read(options).needed_bytes
    return needed_bytes - 2 * EXPERTS_BYTES + EXPERTS_BYTES // 2


def give(monkeypatch: pytest.MonkeyPatch, device_bytes: int, host_bytes: int = 1 << 40) -> None:
    free = {"cuda": device_bytes, "cpu": host_bytes}
    monkeypatch.setattr(engine_config, "available_memory_bytes", lambda device: free[device.type])


def test_a_layer_in_host_memory_costs_one_round_trip_and_no_other_wait(start_on_gpu: Callable[..., Warm]) -> None:
    three, four = (start_on_gpu(MIXTURE, host_expert_layers=number, **LIMITS) for number in (3, 4))
    assert (hosted(three), hosted(four)) == ([True] * 3 + [False], [True] * 4)
    num_known = len(four.gpu.record.variants)
    for warm in (three, four):
        warm.gpu.cuda.waits.clear()
    for num_requests in (1, 2, 4):
        assert copies_of_a_step(four, num_requests) - copies_of_a_step(three, num_requests) == 2
    assert three.gpu.cuda.waits == four.gpu.cuda.waits == []
    assert four.gpu.record.variants[num_known:] == [], "all kernels of small steps were compiled at the start"


def test_a_model_that_does_not_fit_moves_as_few_layers_as_it_takes(
    start_on_gpu: Callable[..., Warm],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    free_bytes: int,
) -> None:
    def find(*given: Any) -> Sizes:
        give(monkeypatch, free_bytes)
        sizes = find_sizes(*given)
        give(monkeypatch, 4 << 30)  # the activations that this GPU measures are a constant
        return sizes

    monkeypatch.setattr(startup, "find_sizes", find)
    with caplog.at_level(logging.INFO):
        warm = start_on_gpu(MIXTURE, **LIMITS)
    assert hosted(warm) == [True, True, False, False]
    assert warm.engine._executor._graphs is None  # type: ignore[attr-defined]
    (said,) = [message for message in caplog.messages if "in host memory" in message]
    assert said.startswith("the experts of 2 of 4 mixture layers stay in host memory: weights take ")
    assert said.endswith(f" of the device and {2 * EXPERTS_BYTES / 1e6:.3g} MB of the host; no CUDA graphs are used")
    assert not [message for message in caplog.messages if message.startswith("recorded ")]
    monkeypatch.setattr(startup, "find_sizes", find_sizes)
    assert hosted(start_on_gpu(MIXTURE, **LIMITS)) == [False] * 4


@pytest.mark.parametrize(
    ("more_bytes", "expected"),
    [(0, 0), (1, 1), (EXPERTS_BYTES, 1), (EXPERTS_BYTES + 1, 2), (10 * EXPERTS_BYTES, 4)],
    ids=["fits", "a byte too many", "one layer exactly", "two layers", "not even all"],
)
def test_layers_move_until_the_cache_that_is_asked_for_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more_bytes: int, expected: int
) -> None:
    folder = write_config(MIXTURE, tmp_path / "model")

    def sizes(kv_cache_memory: int) -> Sizes:
        given = EngineOptions(model=str(folder), device="cuda", load_format="dummy", **LIMITS)
        with FakeGpu(compiles=False):
            return report._read(msgspec.structs.replace(given, kv_cache_memory=kv_cache_memory))

    fitting = sizes(1 << 20)
    assert fitting.needed_bytes == fitting.weights_bytes + fitting.activations_bytes + (1 << 20)
    give(monkeypatch, fitting.needed_bytes)
    assert sizes((1 << 20) + more_bytes).config.num_host_layers == expected


def planned(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path, **options: Any
) -> tuple[int, str]:
    given = EngineOptions(model=str(folder), device="cuda", load_format="dummy", **LIMITS | options)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(msgspec.json.encode(given))))
    with FakeGpu(compiles=False):
        code = report.main("plan")
    return code, "".join(capsys.readouterr())


def test_the_plan_shows_both_memories_or_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], free_bytes: int
) -> None:
    folder = write_config(MIXTURE, tmp_path / "model")
    give(monkeypatch, free_bytes, 2 * EXPERTS_BYTES)
    code, said = planned(monkeypatch, capsys, folder)
    size = f"{2 * EXPERTS_BYTES / 1e6:.3g} MB"
    assert code == 0
    assert f"free memory  {free_bytes / 1e6:.3g} MB, and {size} of the host\n" in said
    assert f"\nhost memory  {size} for the experts of 2 of 4 mixture layers, computed by the CPU: " in said
    give(monkeypatch, free_bytes, 2 * EXPERTS_BYTES - 1)
    code, said = planned(monkeypatch, capsys, folder)
    assert code == 2
    told = f"would take {size} of host memory, of which only {size} are free"
    assert said == f"weft: error: the experts of 2 of 4 mixture layers {told}\n"
    give(monkeypatch, free_bytes)
    code, said = planned(monkeypatch, capsys, folder, host_expert_layers=0)
    assert code == 2 and said.startswith("weft: error: the model does not fit: weights take ")
    give(monkeypatch, EXPERTS_BYTES // 32)
    code, said = planned(monkeypatch, capsys, folder)
    assert code == 2
    moved = "with the experts of 4 of 4 mixture layers in host memory"
    assert said.startswith(f"weft: error: the model does not fit {moved}: weights take ")


def test_of_several_models_each_says_what_it_takes_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_bytes: int
) -> None:
    folder = write_config(MIXTURE, tmp_path / "model")
    options = EngineOptions(model=str(folder), device="cuda", load_format="dummy", **LIMITS)
    give(monkeypatch, free_bytes, 2 * EXPERTS_BYTES)
    with FakeGpu(compiles=False):
        memory = report._measure(options)
    assert (memory.fault, memory.host_bytes) == ("", 2 * EXPERTS_BYTES)
    give(monkeypatch, free_bytes, EXPERTS_BYTES)
    with FakeGpu(compiles=False):
        assert report._measure(options).fault.startswith("the experts of 2 of 4 mixture layers would take ")
