"""Adapters with an embedding or an output head of their own, as PEFT saves them, beside others and none."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.architectures.checkpoints import write
from tests.checkpoints import WIDE_CHECKPOINTS, write_checkpoint
from tests.engine.lora.adapters_for_tests import PROMPTS, add, check, check_all, start_engine, write_adapter
from tests.engine.lora.test_mixed_steps import BFLOAT16, alone, bits, needs_kernels, uncached
from tests.engine.test_golden import run
from weft.engine.lora import targets as saved_modules
from weft.engine.start import report
from weft.engine.wire.errors import ModelError
from weft.engine.wire.messages import EngineOptions
from weft.engine.wire.options import find_adapter

TIED = {"tie_word_embeddings": True}
BOTH = ["embed_tokens", "lm_head"]
HEAD = "base_model.model.lm_head.weight"


def base(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


@pytest.mark.parametrize(
    ("model", "changes", "config"),
    [
        ("llama", {}, {"modules_to_save": BOTH}),
        ("llama", {}, {"modules_to_save": ["lm_head"]}),
        ("llama", TIED, {"modules_to_save": ["embed_tokens"]}),
        ("llama", TIED, {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
        ("llama", TIED, {"modules_to_save": BOTH}),
        ("gpt_neox", {}, {"modules_to_save": ["embed_in", "lm_head"], "target_modules": ["query_key_value"]}),
        ("gemma2", {}, {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
    ],
)
def test_answers_are_those_of_peft(tmp_path: Path, model: str, changes: dict[str, Any], config: dict[str, Any]) -> None:
    """Of an embedding that is also the head, PEFT replaces what it was told to, or both."""
    folder = write(model, tmp_path / "model", changes)
    targets = {key: config[key] for key in ("target_modules",) if key in config}
    references: dict[str | None, Any] = {
        "one": write_adapter(folder, tmp_path / "one", 1, **config),
        "plain": write_adapter(folder, tmp_path / "plain", 2, **targets),
        "two": write_adapter(folder, tmp_path / "two", 3, **config),
        None: base(folder),
    }
    assert [find_adapter("", tmp_path / name).has_modules for name in ("one", "plain")] == [True, False]
    folders = {name: tmp_path / name for name in references if name}
    check_all(start_engine(folder, folders, lora_modules_to_save=2), references)


@pytest.mark.parametrize("changes", [{}, TIED])
def test_embeddings_that_peft_saves_without_being_told_to_replace_the_models(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    """As it does if a vocabulary has been resized: the model that is served then has the rows, but not the values."""
    folder = write("llama", tmp_path / "model", changes)
    reference = write_adapter(folder, tmp_path / "one", target_modules=["q_proj"])
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for layer in (reference.get_input_embeddings(), reference.get_output_embeddings()):
            layer.weight.normal_(0, 0.3)
        reference.save_pretrained(tmp_path / "one", save_embedding_layers=True)
    engine = start_engine(folder, {"one": tmp_path / "one"}, lora_modules_to_save=1)
    check_all(engine, {"one": reference, None: base(folder)})


def test_a_slot_forgets_the_modules_of_the_adapter_before(tmp_path: Path) -> None:
    folder = write("llama", tmp_path / "model")
    write_adapter(folder, tmp_path / "one", 1, modules_to_save=BOTH)
    plain = write_adapter(folder, tmp_path / "plain", 2)
    engine = start_engine(folder, {"one": tmp_path / "one"}, max_loras=1, lora_modules_to_save=1)
    engine._executor.load_adapter(1, tmp_path / "plain").result()
    check(run(engine, [add(0, "one", PROMPTS[0])])[0, 0], PROMPTS[0], plain)


@needs_kernels
@pytest.mark.parametrize("model", ["qwen3-wide", "llama-wide"])
def test_nobody_gets_other_bits_for_who_shares_a_step(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The embedding of the first model is its head, too."""
    monkeypatch.setattr(saved_modules, "_ROWS_AT_ONCE", 3)
    write_checkpoint(WIDE_CHECKPOINTS[model], tmp_path / "model")
    config = {"target_modules": ["q_proj"], "ensure_weight_tying": True}
    for seed, (name, modules) in enumerate((("one", BOTH), ("two", BOTH[:1]), ("plain", None))):
        write_adapter(tmp_path / "model", tmp_path / name, seed, modules_to_save=modules, **config)
    names = ["plain", "two", "one"]
    folders = {name: tmp_path / name for name in names}
    engine = start_engine(tmp_path / "model", folders, **BFLOAT16, lora_modules_to_save=2)
    requests = [add(i, [*names, None][i % 4], list(range(5 + i, 25 + 2 * i)), max_tokens=4) for i in range(12)]
    together = run(engine, requests)
    for request in requests:
        assert alone(engine, uncached(request)) == bits(together, request.request_id)
    unadapted = start_engine(tmp_path / "model", {}, **BFLOAT16 | {"max_loras": 0})
    for request in requests[3::4]:
        assert alone(unadapted, request) == bits(together, request.request_id)


def test_whole_matrices_are_in_the_plan(tmp_path: Path) -> None:
    """An embedding and a head for each of the slots that have room for them."""
    model, num_bytes = write("llama", tmp_path), []
    for number in (0, 2, 99):
        more = {"device": "cpu", "dtype": "float32", "max_loras": 3, "lora_modules_to_save": number}
        num_bytes.append(report._read(EngineOptions(model=str(model), **more)).chosen.adapters_bytes)
        engine = start_engine(model, {}, **more, max_lora_rank=64)
        assert engine._executor._adapters.num_reserved_bytes == num_bytes[-1]  # type: ignore[attr-defined]
    size = base(model).lm_head.weight.numel() * 4
    assert [each - num_bytes[0] for each in num_bytes] == [0, 2 * 2 * size, 3 * 2 * size]


@pytest.mark.parametrize(
    ("modules", "change", "fault"),
    [
        (
            ["norm"],
            lambda t: t,
            r"norm\.weight: of whole modules only an embedding of tokens and an output head are served; merge",
        ),
        (["lm_head"], lambda t: t.pop(HEAD), "tensor weight of lm_head, which is in modules_to_save, is missing"),
        (["lm_head"], lambda t: t.update({HEAD: torch.zeros(4, 64)}), r"lm_head\.weight has shape \[4, 64\]"),
        (["lm_head"], lambda t: t[HEAD].fill_(torch.inf), "weight of lm_head holds values that are not finite"),
        (
            ["lm_head"],
            lambda t: t.update({HEAD.replace("weight", "bias"): t[HEAD][0].clone()}),
            r"lm_head\.bias belongs to no matrix",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, modules: list[str], change: Callable[[dict[str, torch.Tensor]], Any], fault: str
) -> None:
    model = write("llama", tmp_path / "model")
    write_adapter(model, tmp_path, modules_to_save=modules)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=fault):
        start_engine(model, {"one": tmp_path}, lora_modules_to_save=1)


def test_without_room_the_setting_is_named(tmp_path: Path) -> None:
    model = write("llama", tmp_path / "model")
    write_adapter(model, tmp_path, modules_to_save=["lm_head"])
    with pytest.raises(ModelError, match="own lm_head, lora_modules_to_save must be at least 1, but is 0"):
        start_engine(model, {"one": tmp_path}, max_loras=2)
