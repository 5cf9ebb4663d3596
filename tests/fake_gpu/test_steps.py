"""Steps of the real engine on a GPU that is not there: what they launch, compile and wait for."""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import quantized_checkpoints
from tests.checkpoints import CHECKPOINTS, Checkpoint
from tests.engine.requests_for_tests import add_request
from tests.engine.weights.test_quantized import OWN
from tests.fake_gpu.engines import Warm, start_warm
from tests.fake_gpu.gpu import FakeGpu
from tests.fake_gpu.shapes import QWEN3_8B
from tests.gpu.harness import KINDS
from weft.engine.batch import RowMasks
from weft.engine.loop.engine import Engine
from weft.engine.runner.dummy_batch import dummy_batch
from weft.engine.start import startup
from weft.engine.weights import tensor_files

MOST_LAUNCHES = 330
"""Of a decode step of qwen3-8b at batch 1, copies from and to the host included."""

LENGTHS = (1, 7, 16, 64, 300, 1000)
NUM_TOKENS = 9000
"""Of a prompt that takes more than one step, where the model's context is as long."""

FAMILIES: dict[str, dict[str, Any]] = {
    "llama3": {"deterministic": True},
    "mistral-dialect4": {"dtype": "float16"},
    "qwen2-dialect4": {"speculative": "ngram"},
    "qwen3-dialect4": {"kv_cache_dtype": "fp8"},
    "qwen3-windows": {"quantization": "int4"},
    "gemma": {"quantization": "fp8"},
    "gemma2": {},
}
MORE = ("llama2", "llama-biases", "llama-yarn", "mistral", "qwen2", "qwen3")
"""Every family and, spread over them, the settings that choose kernels."""


def traffic(engine: Engine, longest: int) -> None:
    """Requests of every kind and length come while others decode, then many at once; all are answered."""
    num_answered = 0

    def step() -> None:
        nonlocal num_answered
        for _, output in engine.step():
            assert output.message is None
            num_answered += output.finish_reason is not None

    num_choices = 0
    kinds: list[dict[str, Any]] = [*KINDS, *({} for _ in LENGTHS)]
    for number, kind in enumerate(kinds):
        length = min(LENGTHS[number % len(LENGTHS)], longest)
        engine.add(0, add_request([number + 3] * length, number, max_tokens=8, ignore_eos=True, **kind))
        num_choices += kind.get("num_choices", 1)
        step()
    engine.add(0, add_request([2] * min(NUM_TOKENS, longest), 100, max_tokens=5, ignore_eos=True))
    while engine.has_work:
        step()
    for number in range(21):
        engine.add(0, add_request([4] * 3, 200 + number, max_tokens=5, ignore_eos=True, temperature=number % 2))
    while engine.has_work:
        step()
    assert num_answered == num_choices + 1 + 21


def run_masked(warm: Warm) -> None:
    """A step as grammars have it."""
    masks: Future[RowMasks] = Future()
    masks.set_result(RowMasks(np.zeros(1, np.int64), np.zeros((1, -(-warm.vocab_size // 32)), np.int32)))
    batch = dummy_batch(3, warm.engine.scheduler.kv.specs, 16, 1)
    warm.engine._executor.launch(batch, masks)


def run(warm: Warm, *, is_quantized: bool = False) -> None:
    """Traffic after the start-up compiles nothing, and waits for the device nowhere but for results."""
    variants, waits = warm.gpu.record.variants, warm.gpu.cuda.waits
    num_known = len(variants)
    waits.clear()
    with warm.gpu:
        traffic(warm.engine, warm.max_model_len - 10)
        run_masked(warm)
    assert list(map(str, variants[num_known:])) == []
    assert ("multiply_packed" in warm.gpu.launches) == is_quantized
    assert waits == []


def test_after_start_up_nothing_is_compiled(qwen3_8b: Warm) -> None:
    run(qwen3_8b)


LLAMA4 = Checkpoint(
    "llama4_text",
    {
        "head_dim": 16,
        "num_hidden_layers": 4,
        "num_local_experts": 4,
        "intermediate_size_mlp": 96,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 32,
        "floor_scale": 16,
    },
)
"""Attention to chunks and with temperatures, experts of scaled inputs."""


GEMMA4 = Checkpoint(
    "gemma4_text",
    {
        "head_dim": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "sliding_window": 9,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 199,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
)
"""Heads of two sizes, layers that read the keys and values of others, inputs of layers, experts."""


@pytest.mark.parametrize(
    ("checkpoint", "quantization"), [(LLAMA4, "int8"), (GEMMA4, "none")], ids=("llama4_text", "gemma4_text")
)
def test_steps_of_more_kinds_of_layers_are_legal(
    start_on_gpu: Callable[..., Warm], checkpoint: Checkpoint, quantization: str
) -> None:
    run(start_on_gpu(checkpoint, quantization=quantization), is_quantized=quantization != "none")


@pytest.mark.parametrize("name", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_steps_of_every_family_are_legal_and_wait_for_nothing(start_on_gpu: Callable[..., Warm], name: str) -> None:
    options = FAMILIES.get(name, {})
    run(start_on_gpu(CHECKPOINTS[name], **options), is_quantized="quantization" in options)


def test_a_checkpoint_for_fp8_is_multiplied_in_fp8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_files, "PinnedUpload", lambda device: None)
    (folder := tmp_path / "own").mkdir()
    OWN["fp8 outputs"](quantized_checkpoints.write_base(tmp_path / "base"), folder)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"model.layers.1.self_attn.k_scale": torch.tensor(0.5)}, folder / "model.safetensors")
    given, make = list[Any](), startup.make_caches
    monkeypatch.setattr(startup, "make_caches", lambda *parts: given.append(parts[-1]) or make(*parts))
    options = {"load_format": "auto", "dtype": "bfloat16", "kv_cache_dtype": "fp8"}
    warm = start_warm(folder, FakeGpu(compiles=False), **options)
    run(warm, is_quantized=True)
    assert warm.gpu.launches["round_rows"] == warm.gpu.launches["aten._scaled_mm.default"] > 0
    assert list(given[-1]) == [1], "the cache has its scales"


def test_a_decode_step_launches_no_more_than_it_did(start_on_gpu: Callable[..., Warm]) -> None:
    """Its 36 layers are alike: what two more of them launch, the others launch, too."""

    def launches_of(num_layers: int) -> Counter[str]:
        warm, counts = start_on_gpu(QWEN3_8B, num_layers), []
        with warm.gpu:
            warm.engine.add(0, add_request([5] * 1000, max_tokens=20, ignore_eos=True, temperature=0))
            while warm.engine.has_work:
                before = warm.gpu.launches
                warm.engine.step()
                counts.append(warm.gpu.launches - before)
        return counts[len(counts) // 2]

    two, four = launches_of(2), launches_of(4)
    launches = Counter({name: two[name] + 17 * (four[name] - two[name]) for name in four})
    print(f"{launches.total()} launches a decode step: {dict(launches.most_common())}")
    assert launches["attend_kernel"] == 36
    assert launches.total() <= MOST_LAUNCHES
