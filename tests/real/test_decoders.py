"""Trained decoders beside transformers, which computes them in float32 with the weights of the same GGUF file.

Short, one model predicts a part of the text as it is served; whole, both models do all of it in every form.
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.real.decoders import FORMS, NUM_OUTPUT_TOKENS, Reference, Served, closeness, passages, prompts
from tests.real.fetch import DECODERS
from tests.real.lines import odd_lines
from tests.real.llama_ids import STORED, digests
from weft.engine.gguf.folder import made_folder
from weft.server.text.tokenizer import Tokenizer

pytestmark = pytest.mark.real

SMALL = DECODERS[0]
MOST = {
    "as it comes": 0.006,
    "`--kv-cache-dtype int8`": 0.010,
    "`--quantization int8`": 0.009,
    "`--quantization int4`": 0.35,
    "`--dtype float32`": 1e-6,
}
"""Of each form, the largest KL divergence from the reference: about 1.4 times what was measured of the worse model."""
EXACT = "`--dtype float32`"


@pytest.fixture(scope="module")
def reference(real_path: Callable[[str], Path]) -> Callable[[str], Reference]:
    return cache(lambda name: Reference(real_path(name)))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", DECODERS)
def test_predictions_are_close_to_the_reference(
    name: str, form: str, reference: Callable[[str], Reference], real_path: Callable[[str], Path], is_whole: bool
) -> None:
    if not is_whole and (name, form) != (SMALL, "as it comes"):
        pytest.skip("`make real` runs it")
    texts, model = passages(real_path(name))[: None if is_whole else 1], reference(name)
    served = Served(real_path(name), **FORMS[form])

    found = closeness((ids, model.log_probabilities(ids), served.log_probabilities(ids)) for ids in texts)

    assert 5 < found.perplexity < 40  # it was the trained model that ran
    assert found.divergence < MOST[form]
    assert abs(found.growth) < 2 * MOST[form]
    assert found.same_top == 1 if form == EXACT else found.same_top > 0.65


@pytest.mark.parametrize("name", DECODERS)
def test_greedy_outputs_in_float32_are_the_reference_s(
    name: str, reference: Callable[[str], Reference], real_path: Callable[[str], Path], is_whole: bool
) -> None:
    if not is_whole and name != SMALL:
        pytest.skip("`make real` runs it")
    asked, size = prompts(passages(real_path(name))), NUM_OUTPUT_TOKENS
    if not is_whole:
        asked, size = asked[::8], 16

    assert Served(real_path(name), **FORMS[EXACT]).greedy(asked, size) == reference(name).greedy(asked, size)


@pytest.mark.parametrize("name", DECODERS)
def test_ids_of_text_are_llama_cpp_s(name: str, real_path: Callable[[str], Path], is_whole: bool) -> None:
    if not is_whole and name != SMALL:
        pytest.skip("`make real` runs it")
    tokenizer, lines = Tokenizer.load(made_folder(real_path(name))), odd_lines()

    found = digests([tokenizer.encode(line) for line in lines]).split()

    stored = json.loads(STORED.read_text(encoding="utf-8"))[name].split()
    assert [line for line, own, peer in zip(lines, found, stored, strict=True) if own != peer] == []
