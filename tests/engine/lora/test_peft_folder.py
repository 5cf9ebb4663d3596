"""Every setting of an adapter is honoured or refused by name."""

import json
import math
import time
from pathlib import Path
from typing import Any

import peft
import pytest

from weft.engine.lora.peft_folder import read_adapter_config
from weft.engine.wire.errors import ModelError


def write(folder: Path, **changes: Any) -> Path:
    """What PEFT writes for a plain adapter of rank 8, with changes."""
    peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj"]).save_pretrained(folder)
    config = json.loads((folder / "adapter_config.json").read_text()) | changes
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "adapter_model.safetensors").touch()
    return folder


def test_scales_are_those_of_peft(tmp_path: Path) -> None:
    plain = read_adapter_config(write(tmp_path), 8)
    assert (plain.rank_of("model.layers.0.q_proj"), plain.scale_of("model.layers.0.q_proj")) == (8, 2.0)
    patterns = {"rank_pattern": {"q_proj": 4, r"layers\.\d+\.k": 2}, "alpha_pattern": {"^model.layers.1.q_proj": 6}}
    stable = read_adapter_config(write(tmp_path, use_rslora=True, **patterns))
    assert stable.rank_of("model.layers.0.my_q_proj") == 8
    assert stable.scale_of("model.layers.0.q_proj") == 16 / math.sqrt(4)
    assert stable.scale_of("model.layers.1.q_proj") == 6 / math.sqrt(4)
    assert stable.rank_of("model.layers.12.k") == 2


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"peft_type": "VERA"}, "peft_type must be LORA, got VERA"),
        ({"use_dora": True}, "use_dora is not served"),
        ({"use_qalora": True}, "use_qalora is not served"),
        ({"bias": "lora_only"}, "bias lora_only is not served"),
        ({"lora_bias": True}, "lora_bias is not served"),
        ({"modules_to_save": "lm_head"}, "modules_to_save must be a list of strings"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices is not served"),
        ({"layer_replication": [[0, 2]]}, "layer_replication is not served"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens is not served"),
        ({"kasa_config": {"beta": 1e-4}}, "kasa_config is not served: it changes"),
        ({"velora_config": {"num_groups": 4}}, "velora_config is not served"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights pissa_niter_4 is not served"),
        ({"r": 9}, r"the rank must be at most 8 \(max_lora_rank\), got 9"),
        ({"rank_pattern": {"q_proj": 16}}, "the rank must be at most 8"),
        ({"rank_pattern": {"q_proj": 0}}, "q_proj must be a positive integer, got 0"),
        ({"alpha_pattern": {"(a+)+": 2}}, "must have at most 200 characters and 3 repetitions, and no groups"),
        ({"alpha_pattern": {"a*a*a*a*": 2}}, "3 repetitions"),
        ({"alpha_pattern": {"[": 2}}, r"\[ is no pattern"),
        ({"alpha_pattern": ["q_proj"]}, "alpha_pattern must be an object"),
        ({"r": "8"}, 'r must be an integer, got "8"'),
        ({"padding": "x" * (1 << 20)}, "must have at most 1,048,576 bytes"),
    ],
)
def test_what_is_not_served_is_named(tmp_path: Path, changes: dict[str, Any], fault: str) -> None:
    with pytest.raises(ModelError, match=fault):
        read_adapter_config(write(tmp_path, **changes), 8)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        read_adapter_config(tmp_path / "none")
    with pytest.raises(ModelError, match=r"no adapter_config\.json"):
        read_adapter_config(tmp_path)
    (write(tmp_path) / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no adapter_model\.safetensors"):
        read_adapter_config(tmp_path)


def test_patterns_count_in_their_order_whether_they_are_names_or_not(tmp_path: Path) -> None:
    ranks = {"b.q": 1, r".*\.a\.q": 2, "q": 3, "a.q": 4, "^x.k": 5, "k": 6, "w-1": 7}
    config = read_adapter_config(write(tmp_path, rank_pattern=ranks))
    found = {name: config.rank_of(name) for name in ("x.b.q", "x.a.q", "a.q", "x.q", "x.k", "y.x.k", "w-1", "other")}
    assert found == {"x.b.q": 1, "x.a.q": 2, "a.q": 3, "x.q": 3, "x.k": 5, "y.x.k": 6, "w-1": 7, "other": 8}


def test_a_name_for_every_module_is_looked_up_and_patterns_are_few(tmp_path: Path) -> None:
    """Each was compiled and held against each module: a config of 1 MB held the interpreter's lock for minutes."""
    names = [f"model.layers.{i}.mlp.experts.{j}.up_proj" for i in range(20) for j in range(500)]
    config = read_adapter_config(write(tmp_path, rank_pattern=dict.fromkeys(names, 3), alpha_pattern={"x.*": 5}))
    begin = time.process_time()
    assert {config.rank_of(name) for name in names} == {3}
    assert {config.scale_of(name) for name in names} == {16 / 3}
    assert time.process_time() - begin < 2
    with pytest.raises(ModelError, match="rank_pattern must have at most 64 patterns beside names, got 65"):
        read_adapter_config(write(tmp_path, rank_pattern={f"{i}.*": 1 for i in range(65)}))
