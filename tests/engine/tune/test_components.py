"""What is settled for a model, through the real start-up on a CPU."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.architectures.checkpoints import write as write_architecture
from tests.checkpoints import Checkpoint, write_config
from tests.engine.requests_for_tests import add_request
from tests.triton_interpreter import needs_triton
from tests.vector_checkpoints import write_encoder
from weft import server
from weft.engine import config as engine_config
from weft.engine.describe.config import load_model_config
from weft.engine.describe.specs import PreNormSpec
from weft.engine.kernels import choice as kernel_choice
from weft.engine.kernels.cpu import library
from weft.engine.kernels.cpu.attention import NativeBackend
from weft.engine.kernels.cpu.layer_kernels import CpuKernels, NativeSampler
from weft.engine.kernels.triton.prompts import FlashInfer
from weft.engine.layers.block import Layer
from weft.engine.parts.decoder import decoder_spec
from weft.engine.parts.experts import ExpertsSpec
from weft.engine.start.startup import Started, start
from weft.engine.tune import compare, components, trials
from weft.engine.tune.compare import Component, Tuner
from weft.engine.tune.trials import AttentionTrials, StepShape
from weft.engine.wire.errors import ModelError
from weft.engine.wire.machine import KernelChoice
from weft.engine.wire.messages import EngineOptions

DEMO = Path(server.__file__).parent / "demo_model"
OPTIONS = EngineOptions(model=str(DEMO), device="cpu", max_num_seqs=8, kv_cache_memory=30_000_000)

GEMMA4 = Checkpoint(
    "gemma4_text",
    {"head_dim": 256, "global_head_dim": 512, "num_key_value_heads": 2, "num_global_key_value_heads": 1}
    | {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2, "sliding_window": 64}
    | {"attention_k_eq_v": True, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0},
)
"""Heads of two sizes."""

needs_native = pytest.mark.skipif(library.load() is None, reason="no native kernels on this machine")


@pytest.fixture(autouse=True)
def keep_torch_as_it_is() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)
    torch.set_grad_enabled(True)


@pytest.fixture(autouse=True)
def own_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No choice of another test is found here."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "weft" / "settled.json"


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The components that were compared, as it happens."""
    names: list[str] = []
    compare_one = Tuner._compare

    def record(self: Tuner, component: Component) -> tuple[KernelChoice, bool]:
        names.append(component.name)
        return compare_one(self, component)

    monkeypatch.setattr(Tuner, "_compare", record)
    return names


def changed(**changes: Any) -> EngineOptions:
    return msgspec.structs.replace(OPTIONS, **changes)


def kept() -> dict[str, KernelChoice]:
    settled = compare.open_choices(torch.device("cpu")).of_this_machine()
    return {choice.component: choice for choice in settled}


def answer(started: Started) -> list[int]:
    started.engine.add(0, add_request([7, 8, 9], 1, max_tokens=12))
    token_ids: list[int] = []
    while started.engine.has_work:
        for _, output in started.engine.step():
            token_ids += output.token_ids
    return token_ids


@needs_native
def test_ranks_try_the_shapes_of_their_part(own_file: Path) -> None:
    tuner = components.tuner_for(torch.device("cpu"))
    texts = []
    for size in (1, 2):
        options = changed(tensor_parallel_size=size)
        model = load_model_config(DEMO)
        components.tune_kernels(model, engine_config.resolve(options, model), tuner)
        texts.append([kept()[name].shapes for name in ("attention", "layers")])
    assert texts[0][0].startswith("6 heads over 6 x ") and texts[1][0].startswith("3 heads over 3 x ")
    assert texts[0][1] != texts[1][1]
    assert {kept()[name].chosen for name in ("attention", "layers")} == {"native"}


@needs_native
def test_later_starts_compare_nothing_and_another_shape_or_version_does(
    compared: list[str], own_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(2)
    start(OPTIONS, "epoch")
    every = ["attention", "layers", "sampler", "threads"]
    assert compared == every
    assert list(kept()) == every
    assert {kept()[name].chosen for name in every[:3]} == {"native"}
    compared.clear()
    torch.set_num_threads(2)
    start(OPTIONS, "epoch")
    assert compared == ["threads"]  # by time alone, at three starts
    torch.set_num_threads(2)
    start(changed(max_model_len=99), "epoch")
    assert compared == ["threads", "attention", "threads"]  # nothing else depends on it
    compared.clear()
    torch.set_num_threads(2)
    start(OPTIONS, "epoch")
    assert compared == []
    monkeypatch.setattr(compare, "package_version", lambda package: "9.9")
    torch.set_num_threads(2)
    start(OPTIONS, "epoch")
    assert compared == every
    compared.clear()
    own_file.write_text('{"kernels": "of another program"}')
    torch.set_num_threads(2)
    start(OPTIONS, "epoch")
    assert compared == every
    assert list(kept()) == every


@needs_native
def test_a_setting_changes_what_runs(compared: list[str], caplog: pytest.LogCaptureFixture) -> None:
    torch.set_num_threads(2)
    chosen = {"attention": "torch", "layers": "torch", "sampler": "torch", "threads": "2"}
    with caplog.at_level("INFO", "weft.engine"):
        started = start(changed(kernels=chosen), "epoch")
    assert compared == []
    assert started.info.attention_backend == "sdpa"
    assert started.info.device == "cpu (2 threads)"
    assert "layers: torch, as the settings ask" in caplog.messages
    assert any(
        message.startswith("layers: torch") and message.endswith("attention: sdpa") for message in caplog.messages
    )


@pytest.mark.parametrize(
    ("kernels", "message"),
    [
        ({"sampler": "triton"}, "kernels: sampler cannot be triton here: there is native, torch"),
        ({"threads": "77"}, "kernels: threads cannot be 77 here: there is 1, 2"),
        (
            {"prefill_attention": "flash2"},
            "kernels: there is no component prefill_attention on cpu: there is attention, layers, sampler, threads",
        ),
    ],
)
def test_what_does_not_exist_is_refused(kernels: dict[str, str], message: str) -> None:
    torch.set_num_threads(2)
    with pytest.raises(ModelError, match=f"^{message}$"):
        start(changed(kernels=kernels), "epoch")


def test_what_exists_but_cannot_compute_the_model_is_refused_with_the_reason() -> None:
    for component in ("attention", "layers"):
        with pytest.raises(ModelError, match=f"^{component} native needs Weft's native kernels, and they were not "):
            start(changed(dtype="float32", kernels={component: "native"}), "epoch")


class ShiftedNorms(CpuKernels):
    """Kernels that were compiled wrongly: a value of each row is off by half."""

    def norm(self, weight: torch.Tensor, eps: float) -> Layer:
        norm = super().norm(weight, eps)

        def run(hidden: torch.Tensor) -> torch.Tensor:
            outputs = norm(hidden)
            outputs[:, 3] *= 1.5
            return outputs

        return run


@needs_native
def test_an_encoder_attends_natively(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It was compared with chunks and decodes, which an encoder never computes, and found wrong."""
    folder = write_encoder(tmp_path / "bert", "bert", hidden_size=64, num_attention_heads=2)
    start(changed(model=str(folder), dtype="bfloat16"), "epoch")
    assert kept()["attention"].chosen == "native"
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@needs_native
def test_wrong_kernels_cost_speed_and_no_answers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    by_torch = answer(start(changed(kernels={"attention": "torch", "layers": "torch", "sampler": "torch"}), "epoch"))
    attend = NativeBackend.attend

    def forget_a_head(self: NativeBackend, *args: Any) -> torch.Tensor:
        outputs = attend(self, *args)
        outputs[-1, 2] = 0
        return outputs

    monkeypatch.setattr(kernel_choice, "CpuKernels", ShiftedNorms)
    monkeypatch.setattr(NativeBackend, "attend", forget_a_head)
    monkeypatch.setattr(NativeSampler, "__call__", lambda self, logits, batch, masks: logits.argmin(-1))
    started = start(OPTIONS, "epoch")
    assert {name: choice.chosen for name, choice in kept().items() if name != "threads"} == dict.fromkeys(
        ("attention", "layers", "sampler"), "torch"
    )
    assert sum("native is not used; wrong: its error is" in message for message in caplog.messages) == 3
    assert answer(started) == by_torch


def test_right_kernels_are_far_from_the_tolerance_and_wrong_ones_behind_it(
    checkpoint_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """Torch in bfloat16 against torch in float32, with windows, soft caps, biases, norms of every kind, wide heads."""
    folders = [checkpoint_folder(name) for name in ("gemma2", "llama-biases", "qwen3-windows")]
    for folder in [*folders, write_config(GEMMA4, tmp_path / "gemma4")]:
        model = load_model_config(folder)
        config = engine_config.resolve(EngineOptions(model=str(folder), device="cpu", dtype="bfloat16"), model)
        for component, make in components._COMPONENTS["cpu"].items():
            described = make(component, model, config)
            assert described is not None and described.reference is not None
            (candidate,) = described.candidates
            trials = candidate.make.args  # type: ignore[attr-defined]
            by_torch = dataclasses.replace(trials[0], kernels={component: "torch", "attention": "torch"})
            with torch.inference_mode():
                outputs = candidate.make.func(by_torch).outputs()  # type: ignore[attr-defined]
                judge = described.reference()
            assert judge(outputs) < described.tolerance / 2
            assert judge([output.roll(1, 0) for output in outputs]) > described.tolerance * 10


@pytest.mark.parametrize("name", ["exaone", "mpt", "mamba", "falcon_mamba"])
def test_rounding_is_no_fault_where_norms_have_other_names_or_states_multiply(tmp_path: Path, name: str) -> None:
    """Changes of a block were small beside their inputs, whose rounding was taken for a fault: native was not used."""
    model = load_model_config(write_architecture(name, tmp_path))
    config = engine_config.resolve(EngineOptions(model=str(tmp_path), device="cpu", dtype="bfloat16"), model)
    described = components._COMPONENTS["cpu"]["layers"]("layers", model, config)
    assert described is not None and described.reference is not None
    (candidate,) = described.candidates
    by_torch = dataclasses.replace(config, kernels={"layers": "torch", "attention": "torch"})
    with torch.inference_mode():
        outputs = candidate.make.func(by_torch).outputs()  # type: ignore[attr-defined]
        assert described.reference()(outputs) < described.tolerance


@needs_native
def test_attention_that_is_wrong_for_one_size_of_heads_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    attend = NativeBackend.attend

    def shift_wide_heads(self: NativeBackend, *args: Any) -> torch.Tensor:
        outputs = attend(self, *args)
        return outputs.roll(1, 0) if outputs.size(2) == 512 else outputs

    folder = write_config(GEMMA4, tmp_path / "gemma4")
    model = load_model_config(folder)
    config = engine_config.resolve(EngineOptions(model=str(folder), device="cpu", dtype="bfloat16"), model)
    make = components._COMPONENTS["cpu"]["attention"]
    tuner = Tuner(compare.open_choices(config.device), lambda run: 1.0)
    for is_wrong in (True, False):
        with monkeypatch.context() as context, torch.inference_mode():
            if is_wrong:
                context.setattr(NativeBackend, "attend", shift_wide_heads)
            component = make("attention", model, config)
            assert component is not None
            assert tuner._compare(component)[0].chosen == ("torch" if is_wrong else "native")


@needs_triton
def test_a_library_that_cannot_compute_one_size_of_heads_fails_its_trial(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It was tried with heads of 256 values alone, chosen, and then refused at start-up for those of 512."""
    libraries = {"flashinfer": lambda: object.__new__(FlashInfer)}
    monkeypatch.setattr(kernel_choice, "installed_libraries", lambda device: libraries)
    monkeypatch.setattr(kernel_choice, "has_triton", lambda device: True)
    folder = write_config(GEMMA4, tmp_path / "gemma4")
    model = load_model_config(folder)
    config = engine_config.resolve(EngineOptions(model=str(folder), device="cpu", dtype="bfloat16"), model)
    named = dataclasses.replace(config, kernels={"prefill_attention": "flashinfer"})
    with pytest.raises(ModelError, match=r"^prefill_attention flashinfer needs .* heads of 64, 128 or 256 values$"):
        AttentionTrials(model, config, [StepShape(1, 0, 8)]).trial(named)


def test_what_an_fp8_cache_rounds_is_right_and_so_is_what_was_not_rounded_yet() -> None:
    model = load_model_config(DEMO)
    config = engine_config.resolve(changed(kernels={"decode_attention": "torch"}), model)
    trials = AttentionTrials(model, dataclasses.replace(config, rounded_kv=torch.float8_e4m3fn), [StepShape(2, 0, 40)])
    with torch.inference_mode():
        judge = trials.reference()
        assert judge(trials._trial(config, torch.float8_e4m3fn).outputs()) < 0.15
        assert judge(trials.trial(config).outputs()) < 0.02
        assert judge(trials._trial(config, torch.float8_e5m2).outputs()) > 0.15


def test_nothing_is_timed_where_two_starts_must_compute_the_same_bits() -> None:
    model = load_model_config(DEMO)
    config = engine_config.resolve(changed(deterministic=True, kernels={"decode_attention": "triton"}), model)
    made = {name: make(name, model, config) for name, make in components._COMPONENTS["cuda"].items()}
    assert [made.pop(name) for name in ("packed_products", "adapters", "experts", "few_row_products", "launches")] == [
        None
    ] * 5
    for component in made.values():
        assert component is not None
        assert [candidate.name for candidate in component.candidates] == ["triton"]


def test_torch_attends_to_all_or_to_nothing() -> None:
    model = load_model_config(DEMO)
    config = engine_config.resolve(changed(), model)
    by_torch = dataclasses.replace(config, kernels={"decode_attention": "triton-16k", "prefill_attention": "torch"})
    assert components._with_one_cache(by_torch).kernels["decode_attention"] == "torch"
    asked = {"decode_attention": "triton-16k", "prefill_attention": "torch"}
    config = engine_config.resolve(changed(kernels=asked), model)
    with pytest.raises(
        ModelError, match=r"^kernels: decode_attention must be torch, too, if prefill_attention is, got"
    ):
        components._with_one_cache(config)


@needs_triton
@pytest.mark.parametrize("name", [*kernel_choice.FEW_ROWS])
def test_every_choice_for_few_rows_makes_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fallback of this component had a name that nothing knew."""
    monkeypatch.setattr(kernel_choice, "has_triton", lambda device: True)
    model = load_model_config(DEMO)
    config = dataclasses.replace(engine_config.resolve(changed(), model), device=torch.device("cuda"))
    config = dataclasses.replace(config, kernels={"norm_and_activation": "triton"})
    component = components._COMPONENTS["cuda"]["few_row_products"]("few_row_products", model, config)
    assert component is not None and component.fallback == "cublas" and name in component.names
    named = dataclasses.replace(config, kernels={**config.kernels, "few_row_products": name})
    assert type(kernel_choice.choose_kernels(model, named)).__name__ == "TritonKernels"


def test_the_block_with_experts_is_tried(tmp_path: Path) -> None:
    """The first block of such models may have none, and then nothing had compared their experts."""
    folder = write_architecture("deepseek_v2", tmp_path / "model", {"first_k_dense_replace": 1})
    model = load_model_config(folder)
    first, tried = decoder_spec(model).blocks[0], trials.tried_block(model, engine_config.resolve(OPTIONS, model))
    assert isinstance(first, PreNormSpec) and not isinstance(first.feed_forward, ExpertsSpec)
    assert isinstance(tried, PreNormSpec) and isinstance(tried.feed_forward, ExpertsSpec)


@needs_triton
def test_experts_of_blocks_without_a_cache_are_compared_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of Nemotron-H have one part each, and nothing chose what multiplies their experts."""
    monkeypatch.setattr(components, "has_triton", lambda device: True)
    monkeypatch.setattr(kernel_choice, "has_triton", lambda device: True)
    sizes = {"layers_block_type": ["mamba", "moe", "attention"], "head_dim": 12, "mamba_num_heads": 6, "n_groups": 2}
    folder = write_config(Checkpoint("nemotron_h", sizes | {"mamba_head_dim": 16}), tmp_path / "model")
    model = load_model_config(folder)
    config = engine_config.resolve(changed(model=str(folder), dtype="float16"), model)
    assert components._COMPONENTS["cuda"]["experts"]("experts", model, config) is not None
