import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.architectures.checkpoints import write
from tests.engine.given_weights import given
from tests.triton_interpreter import needs_triton
from weft import server
from weft.engine import config as engine_config
from weft.engine.cache.specs import group_layers, paged_groups
from weft.engine.describe.config import load_model_config
from weft.engine.kernels import choice as kernels
from weft.engine.kernels.choice import (
    choose_graph_sampler,
    choose_kernels,
    choose_sampling,
    make_backend,
    make_caches,
    set_num_threads,
)
from weft.engine.kernels.cpu import library
from weft.engine.kernels.cpu.layer_kernels import CpuKernels, WeightStorage
from weft.engine.kernels.cpu.layers import NativeLinear
from weft.engine.kernels.torch.caches import Caches
from weft.engine.kernels.torch.layer_kernels import TORCH_SAMPLING, CublasLinear, TiledLinear, TorchKernels
from weft.engine.kernels.torch.sdpa import SdpaBackend
from weft.engine.kernels.triton.attention_tiles import TileNames
from weft.engine.kernels.triton.prompts import FlashAttention2
from weft.engine.layers.block import Layer
from weft.engine.layers.kernels import LayerKernels
from weft.engine.models.loading import load_weights
from weft.engine.parts.decoder import decoder_spec
from weft.engine.sampling.sampler import SamplingKernels
from weft.engine.start.model_choice import ModelPlan, plan_model
from weft.engine.weights.reader import WeightReader, WeightRef
from weft.engine.wire.errors import ModelError
from weft.engine.wire.messages import EngineOptions

DEMO = Path(server.__file__).parent / "demo_model"
BF16, CPU = torch.bfloat16, torch.device("cpu")


def choose(folder: Path, quantization: str = "none", dtype: str = "auto") -> LayerKernels:
    model = load_model_config(folder)
    options = EngineOptions(model=str(folder), device="cpu", quantization=quantization, dtype=dtype)
    return choose_kernels(model, engine_config.resolve(options, model))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_int8_is_refused_beside_other_types(dtype: str) -> None:
    with pytest.raises(ModelError, match=f"^quantization int8 needs dtype bfloat16 on device cpu, got {dtype}$"):
        choose(DEMO, quantization="int8", dtype=dtype)


def test_fp8_is_refused_on_a_cpu_and_float32_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=r"^quantization fp8 needs device cuda, got cpu, which has int8 and int4$"):
        choose(DEMO, quantization="fp8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    options = EngineOptions(model=str(DEMO), device="cuda", quantization="int4", dtype="float32")
    with pytest.raises(ModelError, match="int4 needs dtype bfloat16 or float16 on device cuda, got float32"):
        engine_config.resolve(options, load_model_config(DEMO))


def test_quantization_on_a_gpu_needs_triton_and_what_it_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(kernels, "has_triton", lambda device: False)
    model, options = load_model_config(DEMO), EngineOptions(model=str(DEMO), device="cuda", quantization="int8")
    config = engine_config.resolve(options, model)
    with pytest.raises(ModelError, match="quantization int8 needs Triton and a C compiler"):
        choose_kernels(model, config)
    monkeypatch.setattr(kernels, "has_triton", lambda device: True)
    with pytest.raises(ModelError, match="quantization int8 needs packed_products triton, got torch"):
        choose_kernels(model, dataclasses.replace(config, kernels={"packed_products": "torch"}))


@pytest.mark.parametrize("component", ["experts", "adapters"])
def test_deterministic_is_refused_if_torch_computes_rows_together(
    monkeypatch: pytest.MonkeyPatch, component: str
) -> None:
    """What torch makes of a row depends on how many an expert or an adapter has."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model, options = load_model_config(DEMO), EngineOptions(model=str(DEMO), device="cuda", deterministic=True)
    config = engine_config.resolve(options, model)
    with pytest.raises(ModelError, match=f"^deterministic is for Weft's own {component}, and there is none"):
        choose_kernels(model, dataclasses.replace(config, kernels={component: "torch"}))


def test_int8_is_refused_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "load", lambda: None)
    assert "torch" in choose(DEMO).name
    with pytest.raises(
        ModelError, match=r"^quantization int8 needs Weft's native kernels, and they were not compiled or "
    ):
        choose(DEMO, quantization="int8")


def test_int8_is_refused_for_sizes_that_the_kernels_do_not_compute(checkpoint_folder: Callable[[str], Path]) -> None:
    with pytest.raises(ModelError, match="cannot compute this model"):
        choose(checkpoint_folder("qwen3"), quantization="int8", dtype="bfloat16")


@pytest.mark.parametrize("is_int8", [False, True])
def test_soft_capped_scores_are_native_as_well(checkpoint_folder: Callable[[str], Path], is_int8: bool) -> None:
    if library.load() is None:
        pytest.skip("no native kernels on this machine")
    folder = checkpoint_folder("gemma2-wide")
    model = load_model_config(folder)
    quantization = "int8" if is_int8 else "none"
    options = EngineOptions(model=str(folder), device="cpu", dtype="bfloat16", quantization=quantization)
    config = engine_config.resolve(options, model)
    assert isinstance(choose_kernels(model, config), CpuKernels)
    assert (
        make_backend(paged_groups(group_layers(decoder_spec(model).caches)), 2, config, model.num_heads).name
        == "native"
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_deterministic_is_refused_where_results_depend_on_the_batch(dtype: str) -> None:
    model = load_model_config(DEMO)
    options = EngineOptions(model=str(DEMO), device="cpu", dtype=dtype, deterministic=True)
    config = engine_config.resolve(options, model)
    groups = paged_groups(group_layers(decoder_spec(model).caches))
    if dtype == "bfloat16" and library.load() is not None:
        assert isinstance(choose_kernels(model, config), CpuKernels)
        assert make_backend(groups, 2, config, model.num_heads).name == "native"
    else:
        with pytest.raises(ModelError, match=r"^deterministic is for Weft's own layers, .* needs dtype bfloat16"):
            choose_kernels(model, config)
        with pytest.raises(ModelError, match=r"^deterministic is for Weft's own attention"):
            make_backend(groups, 2, config, model.num_heads)


def test_an_fp8_cache_is_refused_where_it_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model_config(DEMO)
    with pytest.raises(ModelError, match=r"^kv_cache_dtype fp8 needs device cuda, got cpu$"):
        engine_config.resolve(EngineOptions(model=str(DEMO), device="cpu", kv_cache_dtype="fp8"), model)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    options = EngineOptions(model=str(DEMO), device="cuda", kv_cache_dtype="fp8")
    with pytest.raises(ModelError, match=r"^kv_cache_dtype fp8 needs compute capability 8\.9, got 8\.6$"):
        engine_config.resolve(options, model)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    config = engine_config.resolve(options, model)
    assert config.kv_cache_dtype == torch.float8_e4m3fn
    monkeypatch.setattr(kernels, "has_triton", lambda device: False)
    with pytest.raises(ModelError, match=r"^kv_cache_dtype fp8 needs Triton and a C compiler"):
        make_backend(paged_groups(group_layers(decoder_spec(model).caches)), 2, config, model.num_heads)


def test_an_int8_cache_is_refused_where_it_cannot_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def plan(folder: Path, **changes: object) -> ModelPlan:
        asked = {"device": "cpu", "kv_cache_dtype": "int8"} | changes
        options = EngineOptions(model=str(folder), **asked)  # type: ignore[arg-type]
        model = load_model_config(folder)
        return plan_model(model, engine_config.resolve(options, model))

    plan(DEMO)
    with pytest.raises(ModelError, match=r"^kv_cache_dtype int8 needs dtype bfloat16, got float32$"):
        plan(DEMO, dtype="float32")
    with pytest.raises(ModelError, match=r"^kv_cache_dtype int8 needs Weft's native kernels"):
        plan(DEMO, kernels={"attention": "torch"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ModelError, match=r"^kv_cache_dtype int8 needs device cpu, got cuda$"):
        plan(DEMO, device="cuda")
    with pytest.raises(ModelError, match=r"^kv_cache_dtype int8 is not for latent attention"):
        plan(write("deepseek_v3", tmp_path), dtype="bfloat16")


@needs_triton
@pytest.mark.parametrize("is_deterministic", [False, True])
def test_attention_on_cuda_is_weft_s_own(monkeypatch: pytest.MonkeyPatch, is_deterministic: bool) -> None:
    from weft.engine.kernels.triton import attention as triton
    from weft.engine.kernels.triton import attention_tiles as triton_tuning

    made: list[dict[str, object]] = []
    monkeypatch.setattr(triton, "TritonBackend", lambda *cache, **more: made.append(more))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(kernels, "has_triton", lambda device: True)
    model = load_model_config(DEMO)
    options = EngineOptions(model=str(DEMO), device="cuda", max_num_seqs=7, deterministic=is_deterministic)
    config = engine_config.resolve(options, model)
    for choice, kind in (("flash2", FlashAttention2), ("triton-64", type(None))):
        named = dataclasses.replace(config, kernels={"prefill_attention": choice})
        if is_deterministic and kind is FlashAttention2:
            with pytest.raises(ModelError, match=r"^prefill_attention flash2 is not deterministic$"):
                make_backend(paged_groups(group_layers(decoder_spec(model).caches)), 2, named, model.num_heads)
            continue
        make_backend(paged_groups(group_layers(decoder_spec(model).caches)), 2, named, model.num_heads)
        more = made.pop(0)
        assert type(more["prompts"]) is kind
        named_tiles = TileNames(None, None if kind is FlashAttention2 else choice)
        assert more["tiles"] == (None if is_deterministic else named_tiles)
    make_backend(paged_groups(group_layers(decoder_spec(model).caches)), 2, config, model.num_heads)
    assert [(more["num_heads"], more["cache_dtype"]) for more in made] == [(model.num_heads, config.dtype)]
    limits = triton_tuning.BatchLimits(7, config.max_num_batched_tokens, config.max_model_len)
    assert [(more["limits"], more["is_deterministic"]) for more in made] == [(limits, is_deterministic)]


def test_attention_is_torch_s_where_triton_is_missing_or_does_not_know_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not kernels.has_triton(device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    assert not kernels.has_triton(device)


def choose_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, has_triton: bool, is_deterministic: bool = False
) -> tuple[LayerKernels, SamplingKernels]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(kernels, "has_triton", lambda device: has_triton)
    model = load_model_config(DEMO)
    options = EngineOptions(model=str(DEMO), device="cuda", deterministic=is_deterministic)
    config = engine_config.resolve(options, model)
    assert (choose_graph_sampler(config, 9) is None) != has_triton
    return choose_kernels(model, config), choose_sampling(config)


def test_layers_and_sampler_are_torch_s_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    made, sampling = choose_on_a_gpu(monkeypatch, has_triton=False)
    assert isinstance(made, TorchKernels)
    assert sampling is TORCH_SAMPLING
    monkeypatch.setattr(library, "load", lambda: None)
    config = engine_config.resolve(EngineOptions(model=str(DEMO), device="cpu"), load_model_config(DEMO))
    assert choose_graph_sampler(config, 9) is None
    assert choose_sampling(config) is TORCH_SAMPLING


@needs_triton
def test_layers_and_sampler_are_triton_s_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    made, sampling = choose_on_a_gpu(monkeypatch, has_triton=True)
    assert made.name == "Triton and cuBLAS"
    assert isinstance(made.linear(*given(torch.zeros(2, 3))), CublasLinear)
    assert type(sampling.pick_ids).__name__ == "TritonSampler"
    assert sampling.apply_penalties.__module__ == "weft.engine.kernels.triton.sampling_rows_jit"


@needs_triton
def test_deterministic_layers_on_a_gpu_have_fixed_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.engine.kernels.triton import layer_kernels as triton_kernels

    forbidden: list[bool] = []
    monkeypatch.setattr(triton_kernels, "forbid_split_sums", lambda: forbidden.append(True))
    made, _ = choose_on_a_gpu(monkeypatch, has_triton=True, is_deterministic=True)
    assert made.name == "Triton and cuBLAS in fixed tiles"
    assert forbidden == [True]
    ref, reader = given(torch.zeros(2, 3))
    assert all(isinstance(linear, TiledLinear) for linear in (made.linear(ref, reader), made.tied(ref, reader)[1]))


class MeasuringKit(CpuKernels):
    """Adds up the memory of the matrices that it makes."""

    num_bytes = 0

    def linear(self, ref: WeightRef, reader: WeightReader) -> NativeLinear:
        linear = super().linear(ref, reader)
        self.num_bytes += sum(tensor.nbytes for tensor in linear.matrix.tensors)
        return linear

    def gated(self, ref: WeightRef, reader: WeightReader, activation: str) -> Layer:
        gated = super().gated(ref, reader, activation)
        assert isinstance(gated, NativeLinear)
        self.num_bytes += sum(tensor.nbytes for tensor in gated.matrix.tensors)
        return gated


@pytest.mark.parametrize(("storage", "share"), [("bfloat16", 1.0), ("int8", 0.55), ("int4", 0.32)])
def test_the_bytes_that_are_planned_are_those_that_are_taken(storage: WeightStorage, share: float) -> None:
    native = library.load()
    if native is None:
        pytest.skip("no native kernels on this machine")
    model, made = load_model_config(DEMO), MeasuringKit(native, storage)
    load_weights(DEMO, model, made, device=CPU, dtype=BF16, max_model_len=64)
    spec = decoder_spec(model)
    num_values = sum(matrix.out_features * matrix.in_features for matrix in spec.matrices)
    assert spec.weights_bytes(made, BF16) == made.num_bytes + (spec.num_parameters - num_values) * 2
    assert made.num_bytes <= 2.01 * share * num_values


@pytest.fixture
def restored_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    config = engine_config.resolve(EngineOptions(model=str(DEMO), device="cpu"), load_model_config(DEMO))
    set_num_threads(TorchKernels(), Caches(SdpaBackend((), 1, 16, BF16, CPU)), choose_sampling(config), before)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_torch_keeps_its_threads_only_where_it_computes(restored_threads: None, dtype: str) -> None:
    model = load_model_config(DEMO)
    config = engine_config.resolve(EngineOptions(model=str(DEMO), device="cpu", dtype=dtype), model)
    made = choose_kernels(model, config)
    caches = make_caches(group_layers(decoder_spec(model).caches), 2, config, model.num_heads)
    set_num_threads(made, caches, choose_sampling(config), 3)
    assert torch.get_num_threads() == (1 if isinstance(made, CpuKernels) else 3)
