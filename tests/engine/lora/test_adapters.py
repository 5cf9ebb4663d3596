"""Loading adapters into slots: what is refused changes nothing, a slot can be filled again, and memory is counted."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.architectures.checkpoints import write
from tests.engine.lora.adapters_for_tests import ADAPTERS, PROMPTS, add, check, start_engine, write_adapter
from tests.engine.test_golden import run
from weft.engine.loop.engine import Engine
from weft.engine.lora import adapters
from weft.engine.lora.peft_folder import read_adapter_config
from weft.engine.start import report
from weft.engine.wire.errors import ModelError
from weft.engine.wire.messages import AddRequest, EngineOptions, FinishReason, RequestOutput
from weft.engine.wire.options import find_adapter

Tensors = dict[str, torch.Tensor]
FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(model: Path) -> "Engine[Any]":
    """With a slot that stays empty."""
    return start_engine(model, {}, max_loras=1)


def test_a_slot_is_filled_again_and_a_refused_folder_changes_nothing(model: Path, tmp_path: Path) -> None:
    one = write_adapter(model, tmp_path / "one", 1)
    two = write_adapter(model, tmp_path / "two", 2, target_modules=["v_proj"])
    tensors = load_file(tmp_path / "two/adapter_model.safetensors")
    engine = start_engine(model, {"a": tmp_path / "one"})
    check(run(engine, [add(0, "a", PROMPTS[0])])[0, 0], PROMPTS[0], one)

    def spoil(change: Callable[[Tensors], None]) -> None:
        changed = dict(tensors)
        change(changed)
        save_file(changed, tmp_path / "two/adapter_model.safetensors")

    spoil(lambda changed: changed.update({next(reversed(changed)): torch.zeros(4, 99)}))
    with pytest.raises(ModelError, match=r"has shape \[4, 99\]"):
        engine._executor.load_adapter(1, tmp_path / "two").result()
    check(run(engine, [add(1, "a", PROMPTS[1])])[1, 0], PROMPTS[1], one)
    spoil(lambda changed: None)
    engine._executor.load_adapter(1, tmp_path / "two").result()
    check(run(engine, [add(2, "a", PROMPTS[2])])[2, 0], PROMPTS[2], two)


def test_other_bytes_of_the_same_path_size_and_time_meet_no_blocks_of_the_first(model: Path, tmp_path: Path) -> None:
    """The identity of an adapter was made of these, so that the blocks of other weights were taken for its own."""

    def write(seed: int) -> tuple[Any, list[tuple[str, int]]]:
        reference = write_adapter(model, tmp_path, seed)
        files = sorted(tmp_path.glob("adapter_*"))
        for file in files:
            os.utime(file, (1, 1))
        ADAPTERS["a"] = find_adapter("a", tmp_path)
        return reference, [(file.name, file.stat().st_size) for file in files]

    def answer(request: AddRequest) -> str | None:
        """Why there is none; None if there is one."""
        ready = [] if engine.add(0, request) else engine.take_ready()
        while engine.pending.adapters:
            ready += engine.take_ready()
        outputs.update(run(engine, []))
        return ready[0].fault if ready else None

    def num_hits(number: int) -> int:
        before = engine.scheduler.counters.prefix_cache_hits
        assert answer(add(number, "a", prompt, prompt_logprobs=None)) is None
        return engine.scheduler.counters.prefix_cache_hits - before

    prompt, outputs = list(range(5, 45)), dict[tuple[int, int], RequestOutput]()
    _, files = write(1)
    engine, first = start_engine(model, {"a": tmp_path}), ADAPTERS["a"]
    assert (num_hits(0), num_hits(1) > 0) == (0, True)
    two, again = write(2)
    assert (again, ADAPTERS["a"] != first) == (files, True)
    assert (num_hits(2), num_hits(3) > 0) == (0, True)
    assert answer(add(4, "a", prompt)) is None
    check(outputs[4, 0], prompt, two)
    assert outputs[0, 0].token_ids == outputs[1, 0].token_ids != outputs[2, 0].token_ids
    ADAPTERS["a"] = first
    assert "have changed; load it again with load_inplace" in (answer(add(5, "a", prompt)) or "")


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda t: t.pop(FIRST), "tensor lora_A of model.layers.0.self_attn.q_proj is missing"),
        (lambda t: t[FIRST].fill_(torch.nan), "lora_A of model.layers.0.self_attn.q_proj holds values that are not"),
        (
            lambda t: t.update({FIRST.replace("A", "B"): torch.full((64, 4), 3e38)}),
            "not in float32 after they are scaled",
        ),
        (lambda t: t.update({FIRST: t[FIRST][:2].clone()}), r"q_proj.lora_A.weight has shape \[2, 64\], this model"),
        (lambda t: t.update({FIRST: t[FIRST][:, :8].clone()}), r"has shape \[4, 8\], this .* ask for \[4, 64\]"),
        (lambda t: t.update({FIRST.replace("layers.0", "layers.9"): t[FIRST].clone()}), "layers.9.* no matrix of the"),
        (lambda t: t.update({FIRST.replace("A", "magnitude_vector"): t[FIRST].clone()}), "belongs to no matrix"),
        (lambda t: t.clear(), "holds no tensors"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(
    model: Path, engine: "Engine[Any]", tmp_path: Path, change: Callable[[Tensors], Any], fault: str
) -> None:
    write_adapter(model, tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=fault):
        engine._executor.load_adapter(1, tmp_path).result()


def test_steps_go_on_while_an_adapter_is_read(
    model: Path, engine: "Engine[Any]", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request without an adapter takes as many steps beside a load as without one."""
    reference = write_adapter(model, tmp_path)
    num_steps, goes_on = engine.scheduler.counters.num_steps, threading.Event()
    run(engine, [add(0, None, [41] * 7)])
    num_steps = engine.scheduler.counters.num_steps - num_steps

    def wait(*arguments: Any) -> Any:
        assert goes_on.wait(5)
        return read_adapter_config(*arguments)

    monkeypatch.setattr(adapters, "read_adapter_config", wait)
    ADAPTERS["slow"] = find_adapter("slow", tmp_path)
    assert not engine.add(0, add(1, "slow", PROMPTS[1]))
    assert engine.take_ready() == []
    engine.add(0, add(2, None, [42] * 7))
    outputs = [output for _ in range(num_steps) for _, output in engine.step()]
    assert [(output.request_id, output.finish_reason) for output in outputs][-1] == (2, FinishReason.LENGTH)
    assert engine.take_ready() == []
    goes_on.set()
    while not engine.take_ready():
        pass
    check(run(engine, [])[1, 0], PROMPTS[1], reference)


def test_a_broken_file_is_refused(model: Path, engine: "Engine[Any]", tmp_path: Path) -> None:
    write_adapter(model, tmp_path)
    whole = (tmp_path / "adapter_model.safetensors").read_bytes()
    (tmp_path / "adapter_model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors: not readable"):
        engine._executor.load_adapter(1, tmp_path).result()


def test_a_file_that_is_overwritten_changes_nothing_that_is_loaded(model: Path, tmp_path: Path) -> None:
    """A in float32 was read from the file in every step."""
    reference = write_adapter(model, tmp_path)
    engine = start_engine(model, {"a": tmp_path})
    file = tmp_path / "adapter_model.safetensors"
    with file.open("r+b") as opened:
        opened.write(bytes(file.stat().st_size))
    check(run(engine, [add(0, "a", PROMPTS[0])])[0, 0], PROMPTS[0], reference)


def test_an_embedding_beside_the_adapter_must_be_the_models(model: Path, engine: "Engine[Any]", tmp_path: Path) -> None:
    """PEFT writes the whole embedding beside an adapter of it, which may have been trained."""
    write_adapter(model, tmp_path, target_modules=["embed_tokens"])
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    name = "base_model.model.model.embed_tokens.base_layer.weight"
    assert name in tensors
    engine._executor.load_adapter(1, tmp_path).result()
    save_file(tensors | {name: tensors[name] + 1}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=r"embed_tokens\.base_layer\.weight is not the model's"):
        engine._executor.load_adapter(1, tmp_path).result()


def test_adapters_of_the_language_half_and_of_the_bare_model_have_other_names(model: Path, tmp_path: Path) -> None:
    reference = write_adapter(model, tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    for part in ("model.language_model.layers", "layers"):
        renamed = {name.replace("model.layers", part, 1): tensor for name, tensor in tensors.items()}
        save_file(renamed, tmp_path / "adapter_model.safetensors")
        engine = start_engine(model, {"a": tmp_path})
        check(run(engine, [add(0, "a", PROMPTS[0])])[0, 0], PROMPTS[0], reference)


def test_all_slots_are_in_the_plan(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = EngineOptions(model=str(model), device="cpu", dtype="float32", max_loras=3, max_lora_rank=16)
    expected = 0
    for module in AutoModelForCausalLM.from_pretrained(model).modules():
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            expected += 3 * 16 * sum(module.weight.shape) * 4
    sizes = report._read(options)
    assert sizes.chosen.adapters_bytes == expected
    engine = start_engine(model, {}, max_loras=3, max_lora_rank=16)
    assert engine._executor._adapters.num_reserved_bytes == expected  # type: ignore[attr-defined]
    report._print(options)
    assert ", of which adapters " in capsys.readouterr().out


def test_limits_and_other_models_are_refused_at_start(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="max_lora_rank must be 1 to 512, got 513"):
        start_engine(model, {}, max_lora_rank=513)
    with pytest.raises(ModelError, match="max_loras needs a native family"):
        start_engine(model, {}, model_impl="transformers")
