"""Experts in host memory, where device and host are both the CPU, or the device has shapes and no values.

No GPU is needed: what a layer computes does not depend on where its copies lead. The copies themselves are counted in
`tests/fake_gpu/test_host_experts.py`.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace as replace_fields
from typing_extensions import override

from tests import quantized_checkpoints
from tests.architectures import checkpoints
from tests.checkpoints import Checkpoint, write_checkpoint
from tests.engine.fallback.checkpoints import write
from tests.engine.test_golden import build_engine, greedy, run
from weft.engine import config as engine_config
from weft.engine.config import EngineConfig
from weft.engine.describe.config import ModelConfig, ModelFacts, load_model_config
from weft.engine.families.experts import TopK
from weft.engine.kernels.cpu import library
from weft.engine.kernels.cpu.products import NativeExperts
from weft.engine.kernels.host_experts import HostedKernels, HostExperts
from weft.engine.kernels.torch.layer_kernels import TorchExperts, TorchKernels
from weft.engine.layers.block import Decoder, FeedForward, LoadedModel, PreNormBlock
from weft.engine.layers.feed_forward import ExpertLayer, Experts
from weft.engine.models.loading import load_weights
from weft.engine.parts.decoder import decoder_spec
from weft.engine.parts.experts import ExpertsSpec
from weft.engine.start.draft_model import find_draft_checkpoint
from weft.engine.start.model_choice import ModelPlan, plan_model, read_model
from weft.engine.weights import tensor_files
from weft.engine.wire.errors import ModelError
from weft.engine.wire.messages import EngineOptions, RequestOutput, TokenLogprobs
from weft.server.resolve import resolve
from weft.server.settings import engine_options

META = torch.device("meta")
NUM_LAYERS = {"qwen3_moe": 3, "mixtral": 3, "deepseek_v3": 2}
"""With experts, of three; DeepSeek's first layer is dense, and the others have a shared expert."""

OTHERS = {"gpt_oss": 2, "llama4_text": 2, "gemma4_text": 2}
"""Experts with biases, of scaled inputs, and beside a dense layer."""

CHANGES = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 32}
"""Of Gemma 4, which has no experts otherwise."""

SHARED = ("deepseek_v3", "llama4_text")

WIDE = Checkpoint(
    "qwen3_moe",
    {
        "hidden_size": 128,
        "head_dim": 64,
        "num_hidden_layers": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "intermediate_size": 128,
    },
)
"""As wide as the native kernels need it."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """These models are tiny: threads that wait for each other take most of the time."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def settled(folder: Path, num_layers: int, **options: Any) -> tuple[ModelFacts, EngineConfig]:
    """A config with so many layers' experts in host memory; on the CPU no setting asks for that."""
    given = EngineOptions(
        **{"model": str(folder), "device": "cpu", "dtype": "float32", "max_model_len": 256, **options}
    )
    facts = read_model(folder, given.model_impl)
    return facts, replace(engine_config.resolve(given, facts), num_host_layers=num_layers)


def planned(folder: Path, num_layers: int, **options: Any) -> ModelPlan:
    return plan_model(*settled(folder, num_layers, **options))


def loader(num_layers: int, **options: Any) -> Callable[[Path], tuple[ModelFacts, LoadedModel]]:
    def load(folder: Path) -> tuple[ModelFacts, LoadedModel]:
        facts, config = settled(folder, num_layers, **options)
        return facts, plan_model(facts, config).load(folder, lambda done, total: None)

    return load


def experts_of(model: LoadedModel) -> list[Experts]:
    """Those of each layer that has some."""
    assert isinstance(model, Decoder)
    layers = [block.feed_forward for block in model.blocks if isinstance(block, PreNormBlock)]
    return [layer.experts for layer in layers if isinstance(layer, ExpertLayer)]


@pytest.mark.parametrize("name", [*NUM_LAYERS, *OTHERS])
def test_ids_and_logprobs_are_those_of_experts_on_the_device(tmp_path: Path, name: str) -> None:
    """Bit for bit, but for the order in which a shared expert is added."""
    folder = tmp_path / name
    if name in NUM_LAYERS:
        write(name, folder)
    else:
        checkpoints.write(name, folder, CHANGES if name == "gemma4_text" else {})
    prompts = [[7, 9, 11, 13, 15] * 5, [5, 4], [100, 3, 50] * 9]
    adds = [greedy(number, prompt, logprobs=5, prompt_logprobs=2) for number, prompt in enumerate(prompts)]
    expected = run(build_engine(folder, chunk=16, load=loader(0)), adds)
    for num_layers in (1, (NUM_LAYERS | OTHERS)[name]):
        results = run(build_engine(folder, chunk=16, load=loader(num_layers)), adds)
        for key, output in expected.items():
            assert results[key].token_ids == output.token_ids
            for own, entry in zip(entries(results[key]), entries(output), strict=True):
                assert own.top_token_ids == entry.top_token_ids
                assert own.top_logprobs == pytest.approx(entry.top_logprobs, rel=0, abs=1e-5 * (name in SHARED))


def entries(output: RequestOutput) -> list[TokenLogprobs]:
    return [*(output.prompt_logprobs or []), *(output.logprobs or [])]


@pytest.mark.parametrize("name", NUM_LAYERS)
def test_the_first_layers_with_experts_move_and_no_other(tmp_path: Path, name: str) -> None:
    folder, number = write(name, tmp_path / name), NUM_LAYERS[name]
    _, model = loader(number - 1)(folder)
    moved = [isinstance(experts, HostExperts) for experts in experts_of(model)]
    assert moved == [True] * (number - 1) + [False]


def test_what_moves_counts_for_the_host_and_no_longer_for_the_device(tmp_path: Path) -> None:
    folder = write("deepseek_v3", tmp_path / "model")
    before, after = planned(folder, 0), planned(folder, 1)
    size = 4 * (2 * 32 + 32) * 48 * 4  # experts, values of gate, up and down, hidden size, bytes of a float32
    assert before.experts_bytes == after.experts_bytes == (size, size)
    assert before.host.num_bytes == 0 and before.weights_bytes - after.weights_bytes == size
    share = after.host
    assert (share.num_layers, share.num_all, share.num_bytes) == (1, 2, size)
    model = after.load(folder, lambda done, total: None)
    assert model.weights_bytes == after.weights_bytes
    hosted = experts_of(model)[0]
    assert isinstance(hosted, HostExperts) and isinstance(hosted.experts, TorchExperts)
    assert hosted.experts.gate_up.nbytes + hosted.experts.down.nbytes == size


class Recorded(Experts, FeedForward):
    """Says when it is called."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self._name, self._calls = name, calls

    @override
    def add_to(self, residual: torch.Tensor, *_: torch.Tensor) -> None:
        self._calls.append(self._name)
        residual += 1


@pytest.mark.parametrize(("is_hosted", "order"), [(True, ["shared", "experts"]), (False, ["experts", "shared"])])
def test_a_shared_expert_is_queued_before_the_host_is_waited_for(is_hosted: bool, order: list[str]) -> None:
    calls: list[str] = []
    experts, shared = Recorded("experts", calls), Recorded("shared", calls)
    router = TorchKernels().router(torch.randn(4, 8), None)
    layer = ExpertLayer(router, TopK(2), HostExperts(experts) if is_hosted else experts, None, shared)
    residual = torch.zeros(3, 8)
    layer.add_to(residual, torch.randn(3, 8))
    assert calls == order
    assert residual.eq(2).all()


def test_experts_are_read_straight_into_host_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the device is one without values, the moved experts have theirs, and no tensor of theirs was ever there."""
    folder = write("qwen3_moe", tmp_path / "model")
    config = load_model_config(folder)
    filled: dict[str, str] = {}
    fill = tensor_files.CheckpointSource.fill

    def record(source: Any, name: str, target: torch.Tensor, *more: Any) -> None:
        filled[name] = target.device.type
        fill(source, name, target, *more)

    monkeypatch.setattr(tensor_files.CheckpointSource, "fill", record)
    progress: list[tuple[int, int]] = []
    model = load(config, folder, 2, lambda *done: progress.append(done))
    moved = {name for name, device in filled.items() if device == "cpu"}
    assert moved == {name for name in filled if ".experts." in name and ".layers.2." not in name} and len(moved) == 24
    assert progress[-1][0] == progress[-1][1]
    expected = [experts for experts in experts_of(loader(0)(folder)[1]) if isinstance(experts, TorchExperts)]
    for own, plain in zip(experts_of(model)[:2], expected, strict=False):
        assert isinstance(own, HostExperts) and isinstance(own.experts, TorchExperts)
        assert torch.equal(own.experts.gate_up, plain.gate_up) and torch.equal(own.experts.down, plain.down)


def load(config: ModelConfig, folder: Path, num_layers: int, progress: Callable[[int, int], None]) -> LoadedModel:
    layers = [layer for layer in decoder_spec(config).feed_forwards if isinstance(layer, ExpertsSpec)]
    kernels = HostedKernels.around(TorchKernels(), TorchKernels(), layers[:num_layers])
    sizes: dict[str, Any] = {"device": META, "dtype": torch.float32, "max_model_len": 64}
    return load_weights(folder, config, kernels, progress=progress, **sizes)


def test_quantized_experts_are_decoded_on_the_host(tmp_path: Path) -> None:
    base = tmp_path / "base"
    write_checkpoint(WIDE, base)
    method = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    folder = tmp_path / "own"
    folder.mkdir()
    reference = quantized_checkpoints.write(base, folder, method, quantized_checkpoints.fp8_blocks(32, 32))
    model = load(load_model_config(folder), folder, 1, lambda done, total: None)
    plain = experts_of(loader(0)(reference)[1])[0]
    own = experts_of(model)[0]
    assert isinstance(own, HostExperts) and isinstance(own.experts, TorchExperts) and isinstance(plain, TorchExperts)
    assert torch.equal(own.experts.gate_up, plain.gate_up) and torch.equal(own.experts.down, plain.down)


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_the_host_has_the_native_layout_where_there_is_one(tmp_path: Path, quantization: str) -> None:
    if library.load() is None:
        pytest.skip("no native kernels on this machine")
    write_checkpoint(WIDE, folder := tmp_path / "model")
    options: dict[str, Any] = {"dtype": "bfloat16", "quantization": quantization}
    given = planned(folder, 2, **options)
    assert given.host.num_bytes == sum(given.experts_bytes) and given.host.kernels == given.name
    model, plain = (loader(number, **options)(folder)[1] for number in (2, 0))
    hosted, usual = experts_of(model)[0], experts_of(plain)[0]
    assert isinstance(hosted, HostExperts) and isinstance(hosted.experts, NativeExperts)
    inputs, ids = torch.randn(5, 128).bfloat16(), torch.tensor([[0, 3], [1, 2], [2, 0], [3, 1], [1, 0]])
    shares, residual = torch.rand(5, 2), torch.zeros(5, 128, dtype=torch.bfloat16)
    expected = residual.clone()
    hosted.add_to(residual, inputs, ids, shares)
    usual.add_to(expected, inputs, ids, shares)
    assert torch.equal(residual, expected) and residual.any()


@pytest.mark.parametrize(("name", "number", "most"), [("deepseek_v3", 3, 2), ("gemma3_text", 1, 0)])
def test_more_layers_than_have_experts_are_refused(tmp_path: Path, name: str, number: int, most: int) -> None:
    with pytest.raises(ModelError) as refused:
        planned(write(name, tmp_path / "model"), number)
    counted = f"{most}, the number of layers of this model that have experts"
    assert str(refused.value) == f"host_expert_layers must be at most {counted}, got {number}"


def test_a_module_of_transformers_moves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="host_expert_layers needs a native family, and transformers' module"):
        planned(write("qwen3_moe", tmp_path / "model"), 1, model_impl="transformers")


def test_a_draft_model_stays_on_the_device(tmp_path: Path) -> None:
    folder = write("qwen3_moe", tmp_path / "model")
    facts, config = settled(folder, 2, speculative=str(folder))
    draft = find_draft_checkpoint(config, facts.vocab_size, plan_model(facts, config))
    assert draft is not None and draft.plan.host.num_layers == draft.engine_config.num_host_layers == 0


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"device": "cpu"}, "needs device cuda, got cpu, where all experts are in host memory"),
        ({"tensor_parallel_size": 2}, "does not go together with tensor_parallel_size 2"),
        ({"pipeline_parallel_size": 3}, "does not go together with pipeline_parallel_size 3"),
        ({"max_loras": 2}, "does not go together with max_loras 2"),
        (
            {"quantization": "fp8"},
            "does not go together with quantization fp8, which the CPU's kernels do not have",
        ),
    ],
    ids=["cpu", "tensor parallel", "pipeline", "loras", "fp8"],
)
def test_what_does_not_go_together_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], fault: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    folder = write("qwen3_moe", tmp_path / "model")
    facts, options = read_model(folder, "auto"), EngineOptions(model=str(folder), device="cuda", dtype="bfloat16")
    options = replace_fields(options, **changes)
    assert engine_config.host_experts_fault(options, torch.device(options.device)) == fault
    with pytest.raises(ModelError) as refused:
        engine_config.resolve(replace_fields(options, host_expert_layers=2), facts)
    assert str(refused.value) == f"host_expert_layers 2 {fault}"
    engine_config.resolve(replace_fields(options, host_expert_layers=0), facts)


def test_steps_that_wait_for_the_host_have_the_limits_of_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launched ahead, a step would only hold back the tokens of the one before it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    path = write("qwen3_moe", folder := tmp_path / "model") / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 1 << 15}))
    facts, options = read_model(folder, "auto"), EngineOptions(model=str(folder), device="cuda")
    settings = resolve({"device": "cuda"}, {"WEFT_HOST_EXPERT_LAYERS": "2"}).settings
    assert engine_config.resolve(engine_options(settings, folder), facts).num_host_layers == 2
    usual, asked = (
        engine_config.resolve(replace_fields(options, host_expert_layers=number), facts) for number in (0, 2)
    )
    decided = engine_config.resolve(options, facts, 2)
    assert asked == replace(decided, options=asked.options) and asked.num_host_layers == 2
    limits = [(c.overlap, c.itl_target_s, c.max_num_batched_tokens) for c in (usual, asked)]
    assert limits == [(True, 0.05, 8192), (False, None, 2048)]
    told = engine_config.resolve(replace_fields(options, itl_target_ms=70.0, max_num_batched_tokens=999), facts, 1)
    assert (told.itl_target_s, told.max_num_batched_tokens) == (0.07, 999)
