"""Patterns of names of modules: what published checkpoints have fits as before, and none takes for ever."""

import re
import time

import pytest

from weft.engine.fields import Fields
from weft.engine.weights.module_patterns import module_pattern
from weft.engine.weights.quantization import read_quantization
from weft.engine.wire.errors import ModelError

NAMES = [
    *("lm_head", "model.embed_tokens", "model.norm", "model.layers.0.self_attn.q_proj", "model.layers.10.mlp.gate"),
    *(
        "model.layers.3.mlp.experts.7.gate_proj",
        "model.layers.3.mlp.shared_experts.up_proj",
        "visual.blocks.0.attn.qkv",
    ),
]
USUAL = [
    *(".*lm_head", ".*gate$", "visual.*", r".*\.mlp\.(gate|up)_proj.*", r"model\.layers\.(0|1|10)\..*", "^lm_head$"),
    *(r".*mlp.experts.\d+.(gate|up|down)_proj.*", "^(?!.*experts).*$", r".*(?<!shared_)experts.*", "(?i)LM_HEAD", ""),
    *(r"model[.]layers[.][0-9]+[.].*proj$", r"(?:.*\.)?layers\.\d+\.self_attn\..*", "(?!.*(lm_head|gate))model.*"),
]
HOSTILE = [
    *(
        "(a+)+b",
        "(.*)*x",
        "(.*.*)*x",
        ".*" * 40 + "x",
        "(a|a)" * 40 + "b",
        "(m|mo|o|d|od)*x",
        r"(\w+\.?)+ ",
        "(?:.?){99}x",
    ),
    *("((((m*)*)*)*)*x", r"(.+)\1+\1+x", "(?=(a+)+b)x", "(?!(.*)*x)", "(?=" + "(a|a)" * 40 + "b)", "(?=.*.*.*.*.*.*x)"),
    *("x{1000}{1000}{1000}", "(?<=a)(.*)*x", "(?P<a>.+)(?P=a)+x", "(?=x)" * 5000, "(" * 5000 + ")" * 5000),
]


@pytest.mark.parametrize("text", USUAL)
def test_usual_patterns_fit_as_pythons_do(text: str) -> None:
    ours, pythons = module_pattern(text), re.compile(text)
    for name in NAMES:
        assert bool(ours.search(name)) == bool(pythons.search(name)), name
        assert bool(ours.match(name)) == bool(pythons.match(name)), name


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_no_pattern_takes_for_ever(text: str) -> None:
    """`(a+)+b` in a list of ignored modules hung the start."""
    began = time.thread_time()
    try:
        pattern = module_pattern(text)
    except (re.error, RecursionError, OverflowError):
        return
    for name in ("a" * 200, "model." * 40, "model.layers.0." + "a" * 100):
        pattern.search(name)
        pattern.match(name)
    assert time.thread_time() - began < 0.5


@pytest.mark.parametrize("text", [r"(.+)\1+x", "(?=(a+)+b)", "(", "[", "(?=" + ".*" * 9 + ")", "(" * 5000 + ")" * 5000])
def test_a_config_with_such_a_pattern_is_refused(text: str) -> None:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}}
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
        "ignore": [f"re:{text}"],
    }
    with pytest.raises(ModelError, match="ignore must be made of regular expressions that take little time"):
        read_quantization(Fields(config, "config.json"))
