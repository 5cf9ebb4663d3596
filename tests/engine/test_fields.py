"""Whatever numbers the files of a model hold: a configuration, or one line that names what is wrong, and soon."""

import importlib.machinery
import importlib.util
import json
import math
import re
import sys
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.architectures import table
from tests.architectures.checkpoints import tiny_config
from tests.architectures.serving import NATIVE
from weft.engine import fields as fields_module
from weft.engine.describe.config import load_model_config
from weft.engine.families.registry import identify
from weft.engine.fields import MAX_CONTEXT, MAX_NUM_LAYERS, Fields, own_range, range_of, understood
from weft.engine.parts.decoder import decoder_spec
from weft.engine.wire.errors import ModelError

FAMILIES = [name for name, entry in table.load()["entries"].items() if entry["outcome"] == NATIVE]
HOSTILE = ("1000000000", "0", "-1", "1e308", "1e400", "NaN", "1", "2", "3", "0.5", "true", '"x"', "[0]", "9" * 400)
MARK = "@@"


def numbers_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of every number and list."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from numbers_in(item, (*path, key))
    elif isinstance(value, list):
        yield path
        yield from numbers_in(dict(enumerate(value[:1])), path)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path


def replaced(values: Any, path: tuple[Any, ...], text: str) -> str:
    whole = part = json.loads(json.dumps(values))
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = MARK
    return json.dumps(whole).replace(f'"{MARK}"', text)


@pytest.mark.parametrize("name", FAMILIES)
def test_no_number_of_a_family_ends_in_a_traceback(tmp_path: Path, name: str) -> None:
    """A billion layers took 9 GB; zeros and infinities ended in tracebacks."""
    values = json.loads(json.dumps(tiny_config(name).to_dict(), default=str))
    values["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]]
    hostile, num_refused = cycle(HOSTILE), 0
    for path in numbers_in(values):
        for _ in range(2):
            (tmp_path / "config.json").write_text(replaced(values, path, next(hostile)))
            try:
                with understood(tmp_path / "config.json"):
                    decoder_spec(load_model_config(tmp_path))
            except ModelError as error:
                num_refused += 1
                assert "\n" not in str(error) and len(str(error)) < 500
                if re.search(rf": {path[-1]} must be between", str(error)) and own_range(path[-1]):
                    with pytest.raises(ModelError, match="must be between"):  # the supervisor says it, too
                        identify(tmp_path)
    assert num_refused > 5


@pytest.mark.parametrize(
    ("family", "field"),
    [
        *(("llama", name) for name in ("head_dim", "hidden_size", "num_attention_heads", "vocab_size", "rope_theta")),
        *(("deepseek_v3", name) for name in ("kv_lora_rank", "v_head_dim", "qk_nope_head_dim", "qk_head_dim")),
        *(("qwen3_next", name) for name in ("linear_key_head_dim", "linear_conv_kernel_dim", "linear_num_key_heads")),
        *(("mamba2", name) for name in ("state_size", "conv_kernel", "expand", "chunk_size")),
        *(
            ("gpt2", "n_positions"),
            ("recurrent_gemma", "lru_width"),
            ("jamba", "mamba_d_state"),
            ("lfm2", "conv_L_cache"),
        ),
    ],
)
@pytest.mark.parametrize("value", [0, -1, -0.5, 1e30])
def test_sizes_and_divisors_are_refused_before_an_engine_is_started(
    tmp_path: Path, family: str, field: str, value: float
) -> None:
    """A head_dim of 0 was refused by the engine, seconds later; others by nobody."""
    values = json.loads(json.dumps(tiny_config(family).to_dict(), default=str))
    values["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]]
    values[field] = value
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelError, match=f"{field} must be |its values do not go together") as caught:
        identify(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("[" * 200_000, "not readable as JSON"),
        ('{"a":' * 200_000 + "1" + "}" * 200_000, "nested too deeply"),
        ("[" * 200_000 + "]" * 200_000, "nested too deeply"),
        ('{"hidden_size": ' + "9" * 5000 + "}", "not readable as JSON"),
        ("", "not readable as JSON"),
        ("3", "expected a JSON object"),
    ],
)
def test_json_of_any_form_is_one_line(tmp_path: Path, text: str, fault: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=fault) as caught:
        identify(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_file_is_bounded_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fields_module, "MAX_FILE_BYTES", 10)
    (tmp_path / "config.json").write_text('{"a": "0123456789"}')
    with pytest.raises(ModelError, match=r"config\.json: must have at most 10 bytes, has 19"):
        Fields.read(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_hidden_layers", MAX_NUM_LAYERS + 1), ("num_hidden_layers", 0), ("hidden_size", 1 << 25),
        ("factor", 1e308), ("factor", math.inf), ("rope_theta", math.nan), ("rope_theta", 1.0), ("eps", 10**400),
        ("pad_token_id", 1 << 40), ("scale", -1e300), ("max_position_embeddings", MAX_CONTEXT + 1), ("norm_eps", -1),
    ],
)  # fmt: skip
def test_an_error_names_field_bounds_and_value(name: str, value: float) -> None:
    fields = Fields({name: value}, "config.json")
    low, high = range_of(name, isinstance(value, int))
    with pytest.raises(ModelError, match=rf"config\.json: {name} must be between .* and .*, got ") as caught:
        fields.integer(name) if isinstance(value, int) else fields.number(name)
    assert f"{low:.15g} and {high:.15g}" in str(caught.value) and len(str(caught.value)) < 250


def test_lists_have_the_range_of_their_field() -> None:
    fields = Fields({"long_factor": [1.0, 1e9], "time_step_limit": [0.0, math.inf], "eos_token_id": [1, 1 << 33]}, "f")
    assert fields.numbers("time_step_limit") == (0.0, math.inf)
    for name, read in (("long_factor", fields.numbers), ("eos_token_id", fields.integers)):
        with pytest.raises(ModelError, match=f"{name} must be between"):
            read(name)


@pytest.mark.parametrize("place", [(), ("text_config",), ("text_config", "deeper", "still")])
@pytest.mark.parametrize(("name", "value"), [("num_hidden_layers", 10**9), ("n_layer", 513), ("d_model", 1 << 30)])
def test_what_others_read_is_bounded_at_any_depth(place: tuple[str, ...], name: str, value: int) -> None:
    """transformers built a module with a billion layers."""
    values: dict[str, Any] = {name: value}
    for key in reversed(place):
        values = {key: [values]}
    with pytest.raises(ModelError, match=f"{name} must be at most"):
        Fields(values, "config.json").check_all()
    Fields({"a": [{name: 12}, -1, None, True, "x"]}, "config.json").check_all()


@pytest.mark.parametrize("model_impl", ["auto", "transformers"])
@pytest.mark.parametrize("more", [{}, {"model_type": "qwerty"}, {"text_config": {"model_type": "qwerty"}}])
def test_an_unknown_architecture_is_refused_without_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_impl: str, more: dict[str, object]
) -> None:
    """The engine imported transformers for 40 s to say it."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["QwertyForCausalLM"], **more}))
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr(importlib.util, "find_spec", importlib.machinery.PathFinder.find_spec)
    with pytest.raises(ModelError, match=r"architecture QwertyForCausalLM is not supported: .* transformers 5"):
        identify(tmp_path, model_impl)
    half = {"architectures": ["AnyName"], "text_config": {"model_type": "gpt2"}}
    (tmp_path / "config.json").write_text(json.dumps(half))  # whose text half its module may serve
    assert identify(tmp_path, model_impl).switches is None


def test_experts_are_counted_together(tmp_path: Path) -> None:
    values = json.loads(json.dumps(tiny_config("qwen3_moe").to_dict(), default=str))
    values["architectures"] = ["Qwen3MoeForCausalLM"]
    for changes, fault in (
        ({"num_experts": 16_000, "num_hidden_layers": 5, "layer_types": None}, "between 1 and 65536 experts together"),
        ({"num_experts_per_tok": 9}, "a token cannot choose 9 of 8 experts"),
        ({"num_experts_per_tok": 0}, "a token cannot choose 0 of 8 experts"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(values | changes))
        with pytest.raises(ModelError, match=fault):
            decoder_spec(load_model_config(tmp_path))
