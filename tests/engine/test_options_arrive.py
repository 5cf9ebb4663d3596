"""Every option of the engine, changed, is seen where it is used; one without an entry here fails the first test."""

import dataclasses
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import MagicMock

import msgspec
import pytest
import torch

from weft.engine import process
from weft.engine.kernels.torch.layer_kernels import pick_ids
from weft.engine.layers.block import Decoder
from weft.engine.runner.model_runner import ModelRunner
from weft.engine.start.startup import Started, start
from weft.engine.wire.errors import ModelError
from weft.engine.wire.messages import EngineOptions


@pytest.fixture(autouse=True)
def keep_torch_as_it_is() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)
    torch.set_grad_enabled(True)


@dataclasses.dataclass(frozen=True)
class Seen:
    """An option's other value, and what is seen of it in an engine that was started with it."""

    value: object
    see: Callable[[Started], object]
    expected: object


def embedded(started: Started) -> torch.Tensor:
    model: Decoder = started.engine._executor._model  # type: ignore[attr-defined]
    return model.embedding(torch.tensor([7]))


def is_native(started: Started) -> bool:
    return isinstance(started.engine._executor._model, Decoder)  # type: ignore[attr-defined]


def drafters(started: Started) -> list[str]:
    return [type(drafter).__name__ for drafter in started.engine._speculator._drafters]  # type: ignore[union-attr]


def sampler(started: Started) -> object:
    runner: ModelRunner = started.engine._executor  # type: ignore[assignment]
    return runner._sampling.pick_ids


SEEN = {
    "dtype": Seen("bfloat16", lambda s: embedded(s).dtype, torch.bfloat16),
    "max_model_len": Seen(100, lambda s: s.engine._max_model_len, 100),
    "max_num_seqs": Seen(3, lambda s: s.engine.scheduler._max_num_seqs, 3),
    "max_num_batched_tokens": Seen(77, lambda s: s.engine.scheduler.token_budget.max_num_tokens, 77),
    "kv_cache_memory": Seen(100_000, lambda s: s.plan.kv_cache_bytes, 98_304),
    "kernels": Seen({"sampler": "torch"}, sampler, pick_ids),
    "block_size": Seen(16, lambda s: s.engine.scheduler.kv.block_size, 16),
    "prefix_caching": Seen(False, lambda s: s.engine.scheduler.kv.prefix_caching, False),
    "pin_share": Seen(0.5, lambda s: s.engine.scheduler.kv.pins._max_num_blocks, 7),
    "itl_target_ms": Seen(123.0, lambda s: s.engine.scheduler._target._seconds, 0.123),
    "speculative": Seen("ngram", lambda s: "NgramDrafter" in drafters(s), True),
    "max_num_waiting": Seen(7, lambda s: s.engine._max_num_waiting, 7),
    "max_loras": Seen(2, lambda s: s.engine.pending.adapters.num_slots, 2),
    "lora_modules_to_save": Seen(1, lambda s: s.engine.pending.adapters.num_with_modules, 1),
    "load_format": Seen("dummy", lambda s: bool(embedded(s).abs().max() < 0.2), True),
}
REFUSED_ON_A_CPU = {
    "device": ("cuda", "device cuda was asked for"),
    "kv_cache_dtype": ("fp8", "kv_cache_dtype fp8 needs device cuda"),
    "quantization": ("int8", "quantization int8 needs dtype bfloat16 on device cpu"),
    "kv_offload": (1 << 20, "kv_offload keeps blocks in the host's memory"),
    "host_expert_layers": (1, "host_expert_layers 1 needs device cuda, got cpu"),
    "deterministic": (True, "deterministic is for Weft's own layers"),
}
"""What a CPU with float32 has not arrives as a refusal."""

OTHERS = {
    "model",
    "log_format",
    "stall_timeout_s",
    "model_impl",
    "task",
    "pooling",
    "kv_offload_dir",
    "kv_offload_disk",
    "kv_role",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "nnodes",
    "node_rank",
    "master_addr",
    "master_port",
    "nodes_token",
    "kv_events",
    "kv_events_topic",
    "kv_events_replay",
    "kv_events_buffer",
    "lora",
    "max_lora_rank",
    "pictures",
}
"""Have tests of their own: below, in tests/engine/start/test_vector_model.py, in tests/engine/ranks/test_ranks.py, in
tests/engine/ranks/test_nodes.py, in tests/engine/ranks/test_node_process.py, in tests/faults/test_hung_engine.py, in
tests/engine/cache/test_offload_engine.py, in tests/engine/vision/test_eyes.py, and in
tests/end_to_end/test_kv_events.py and tests/end_to_end/test_adapters.py."""


def test_there_is_a_test_for_every_option() -> None:
    assert {*SEEN, *REFUSED_ON_A_CPU, *OTHERS} == set(EngineOptions.__struct_fields__)


@pytest.fixture(scope="module")
def usual(checkpoint_folder: Callable[[str], Path]) -> EngineOptions:
    return EngineOptions(model=str(checkpoint_folder("qwen3")), device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def started(usual: EngineOptions) -> tuple[Started, Started]:
    """With the defaults, and with every option changed that a CPU has."""
    changes = {name: seen.value for name, seen in SEEN.items()}
    return start(usual, "epoch"), start(msgspec.structs.replace(usual, **changes), "epoch")


@pytest.mark.parametrize("name", SEEN)
def test_an_option_arrives(started: tuple[Started, Started], name: str) -> None:
    before, after = map(SEEN[name].see, started)
    assert after == SEEN[name].expected
    assert after != before


@pytest.mark.parametrize("name", REFUSED_ON_A_CPU)
def test_what_a_cpu_has_not_is_refused(usual: EngineOptions, name: str) -> None:
    if name == "device" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    value, message = REFUSED_ON_A_CPU[name]
    with pytest.raises(ModelError, match=message):
        start(msgspec.structs.replace(usual, **{name: value}), "epoch")


def test_events_of_a_cache_need_one(usual: EngineOptions) -> None:
    with pytest.raises(ModelError, match="kv_events tells which blocks are cached, and this engine caches none"):
        start(msgspec.structs.replace(usual, kv_events="ipc://unused", prefix_caching=False), "epoch")


def test_the_implementation_arrives(usual: EngineOptions, started: tuple[Started, Started]) -> None:
    assert is_native(started[0])
    assert not is_native(start(msgspec.structs.replace(usual, model_impl="transformers"), "epoch"))


def test_the_model_arrives(usual: EngineOptions, checkpoint_folder: Callable[[str], Path]) -> None:
    other = msgspec.structs.replace(usual, model=str(checkpoint_folder("llama2")))
    assert start(other, "epoch").info.architecture == "LlamaForCausalLM"


def test_the_log_format_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ModelError("no such folder")

    formats: list[str] = []
    monkeypatch.setattr(process, "EngineProcess", refuse)
    monkeypatch.setattr(process, "follow_parent", MagicMock())  # what it makes of its own process
    monkeypatch.setattr(process.logs, "configure", lambda log_format, name: formats.append(log_format))
    options = msgspec.json.encode(EngineOptions(model="fake", log_format="json"))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(options)))
    assert process.main(tmp_path) == process.EXIT_CANNOT_LOAD
    assert formats == ["json"]
