import io
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.architectures import checkpoints
from tests.engine.fallback.checkpoints import write
from weft.engine import config as engine_config
from weft.engine.cache.specs import PagedKV
from weft.engine.fallback import parity
from weft.engine.start import model_choice, report
from weft.engine.start.model_choice import ModelPlan, plan_model, read_model
from weft.engine.start.startup import start
from weft.engine.wire.errors import ModelError
from weft.engine.wire.messages import EngineOptions


def planned(options: EngineOptions) -> ModelPlan:
    facts = read_model(Path(options.model), options.model_impl)
    return plan_model(facts, engine_config.resolve(options, facts))


def options_for(folder: Path, **changes: object) -> EngineOptions:
    return msgspec.structs.replace(EngineOptions(model=str(folder), device="cpu", dtype="float32"), **changes)


def test_a_family_is_native_unless_told_otherwise(checkpoint_folder: Callable[[str], Path]) -> None:
    folder = checkpoint_folder("gemma2")
    auto, other = planned(options_for(folder)), planned(options_for(folder, model_impl="transformers"))
    assert auto.name == planned(options_for(folder, model_impl="native")).name
    assert auto.name in ("torch", "torch with oneDNN")
    assert other.name == "transformers, torch"
    own = tuple(replace(spec, num_heads=None) for spec in other.cache_specs if isinstance(spec, PagedKV))
    assert own == auto.cache_specs
    assert other.weights_bytes == auto.weights_bytes


@pytest.mark.parametrize("name", ["cohere", "qwen3_moe"])
def test_the_plan_before_loading_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    options = options_for(write(name, tmp_path), max_model_len=64, model_impl="transformers")
    chosen = planned(options)
    model = chosen.load(tmp_path, lambda done, total: None)
    assert chosen.cache_specs == model.cache_specs
    assert chosen.weights_bytes == pytest.approx(model.weights_bytes, rel=0.01)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(msgspec.json.encode(options))))
    assert report.main("plan") == 0
    assert "ForCausalLM; layers: transformers, torch)" in capsys.readouterr().out.splitlines()[0]


def test_tables_of_positions_end_where_the_cache_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("cohere", tmp_path) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 1 << 24}))
    chosen = planned(options_for(tmp_path, kv_cache_memory=1 << 22))
    loaded: dict[str, Any] = {}
    monkeypatch.setattr(model_choice, "load_weights", lambda *args, **options: loaded.update(options))
    chosen.load(tmp_path, lambda done, total: None)
    block_bytes = sum(spec.bytes_per_block(32, torch.float32) for spec in chosen.cache_specs)
    assert loaded["max_model_len"] == (1 << 22) // block_bytes * 32 < 1 << 14


def test_native_refuses_what_has_no_family(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["DogeForCausalLM"], "model_type": "doge"}')
    with pytest.raises(
        ModelError, match=r"architecture DogeForCausalLM is not supported natively \(`weft models --architectures`"
    ):
        planned(options_for(tmp_path, model_impl="native"))


@pytest.mark.parametrize(
    "changes", [{"deterministic": True}, {"quantization": "int8", "dtype": "bfloat16"}], ids=["deterministic", "int8"]
)
def test_what_only_weft_s_layers_have_is_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    with pytest.raises(ModelError, match="needs a native family, and transformers' module computes CohereForCausalLM"):
        planned(options_for(write("cohere", tmp_path), model_impl="transformers", **changes))


def test_a_module_that_keeps_its_own_cache_rounds_nothing(tmp_path: Path) -> None:
    """It was served in 16 bits, whatever was asked for."""
    with pytest.raises(ModelError, match=r"^kv_cache_dtype int8 is not for this model, whose module of transformers"):
        planned(options_for(checkpoints.write("doge", tmp_path), kv_cache_dtype="int8", dtype="bfloat16"))


def test_a_model_without_keys_and_values_rounds_none(tmp_path: Path) -> None:
    """The option was ignored, and the plan said `KV cache in int8`."""
    with pytest.raises(ModelError, match=r"^kv_cache_dtype int8 is for keys and values, and this model has none$"):
        planned(options_for(checkpoints.write("mamba", tmp_path), kv_cache_dtype="int8", dtype="bfloat16"))


def test_a_large_model_is_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    options = options_for(write("cohere", tmp_path), max_model_len=64, model_impl="transformers")
    with caplog.at_level(logging.INFO):
        planned(options).load(tmp_path, lambda done, total: None)
        assert "answers the same over Weft's cache" in caplog.text
        caplog.clear()
        monkeypatch.setattr(parity, "_MAX_COMPARED_BYTES", {"cpu": 1000})
        planned(options).load(tmp_path, lambda done, total: None)
    assert "is not compared" in caplog.text
    assert "answers the same" not in caplog.text


def test_a_native_draft_serves_a_model_of_transformers(
    tmp_path: Path, checkpoint_folder: Callable[[str], Path]
) -> None:
    options = options_for(write("cohere", tmp_path), max_model_len=64, speculative=str(checkpoint_folder("qwen3")))
    assert start(options, "epoch").info.architecture == "CohereForCausalLM"
