"""Every causal architecture of transformers is served rightly or refused by name, and the stored table says which."""

import dataclasses
from pathlib import Path

import pytest
import transformers

from tests.architectures import table
from tests.architectures.checkpoints import BUILT, NUM_OUTPUT_TOKENS, OUTCOMES, golden, names, reference_ids, write
from tests.architectures.serving import NATIVE, REFUSED, TRANSFORMERS, WrongAnswerError, serve

SMALL_PART = {
    "bloom",
    "deepseek_v3",
    "falcon_h1",
    "gemma2",
    "gemma3",
    "gemma4_text",
    "gpt2",
    "gpt_oss",
    "lfm2",
    "kimi_linear",
    "llama",
    "llama4_text",
    "mamba2",
    "minicpm3",
    "mixtral",
    "olmo2",
    "phi3",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "smollm3",
}
"""Between them attention of many kinds, experts, latent attention, states, and a wrapped configuration."""

MARKED = [name if name in SMALL_PART else pytest.param(name, marks=pytest.mark.slow) for name in names()]
STORED = table.load()
is_of_this_version = pytest.mark.skipif(
    transformers.__version__ != STORED["transformers"], reason="the table was made with another version of transformers"
)

pytestmark = pytest.mark.filterwarnings("default")  # what modules of transformers warn of is no failure here


@is_of_this_version
def test_the_table_has_an_entry_for_every_model_type() -> None:
    outcomes = {name: entry["outcome"] for name, entry in STORED["entries"].items()}
    assert outcomes.keys() == OUTCOMES.keys()
    for name, outcome in OUTCOMES.items():
        known = {NATIVE, TRANSFORMERS, REFUSED} if outcome == BUILT else {outcome.partition(":")[0]}
        assert outcomes[name] in known, "run `python -m tests.architectures.table`"


@pytest.mark.parametrize("name", MARKED)
def test_it_is_served_rightly_or_refused(tmp_path: Path, name: str) -> None:
    entry = table.entry(name, tmp_path)
    assert entry["outcome"] in (NATIVE, TRANSFORMERS, REFUSED) and entry["detail"]
    if transformers.__version__ == STORED["transformers"]:
        assert entry == STORED["entries"][name], f"run `python -m tests.architectures.table {name}`"


def test_a_wrong_answer_is_found(tmp_path: Path) -> None:
    folder = write("llama", tmp_path / "llama")
    expected = golden(folder)
    outputs = [*expected.outputs[:-1], [*expected.outputs[-1][:-1], 0]]
    with pytest.raises(WrongAnswerError, match=r"^cold, prompt 5 of \d+ tokens: .* instead of "):
        serve(folder, dataclasses.replace(expected, outputs=outputs))


def test_the_same_name_gives_the_same_checkpoint(tmp_path: Path) -> None:
    """And the reference is what transformers answers: an end id at the end alone, or all tokens."""
    first, second = write("qwen3_moe", tmp_path / "first"), write("qwen3_moe", tmp_path / "second")
    for path in first.iterdir():
        assert path.read_bytes() == (second / path.name).read_bytes()
    expected = golden(first)
    for prompt, output in zip(expected.prompts, expected.outputs, strict=True):
        assert reference_ids(second, prompt, NUM_OUTPUT_TOKENS) == output
        assert len(output) == NUM_OUTPUT_TOKENS or output[-1] in (2, 3)
        assert not {2, 3} & set(output[:-1])
