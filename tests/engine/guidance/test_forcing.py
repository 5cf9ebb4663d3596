import json
import time

import llguidance
import numpy as np
import pytest

from tests.engine.guidance.demo import DEMO_MODEL, VOCAB_SIZE, json_grammar, matcher
from weft.engine.guidance.matcher import MAX_FORCED_BYTES, Forcing

WORDS = "once upon a time there was a zebra. " * 300
TIME_LIMIT_S = 5.0
"""For what takes 20 ms, and took half a minute and gigabytes when the library looked for the end of what is forced."""


def array_of(text: str) -> dict[str, object]:
    return {"type": "array", "minItems": 1000, "maxItems": 1000, "items": {"const": text}}


def doubling(num_levels: int) -> dict[str, object]:
    """2,000 bytes that force 8,192 copies of a sentence."""
    members = [{name: {"$ref": f"#/$defs/d{i + 1}"} for name in "xy"} for i in range(num_levels)]
    defs: dict[str, object] = {
        f"d{i}": {"type": "object", "properties": two, "required": ["x", "y"], "additionalProperties": False}
        for i, two in enumerate(members)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{num_levels}": {"const": WORDS[:36]}}}


def behind_a_choice(text: str) -> dict[str, object]:
    properties = {"a": {"enum": ["x", "y"]}, "b": array_of(text)}
    return {"type": "object", "properties": properties, "required": ["a", "b"], "additionalProperties": False}


CHAIN = "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(20))
LARK = f'start: a0\n{CHAIN}\na20: "once upon a time "'

ENDLESS = {
    "references that double": (json_grammar(doubling(13)), '{"x":{"x":', ""),
    "from the start": (json_grammar(array_of(WORDS)), f'["{WORDS[:50]}', ""),
    "behind a choice": (json_grammar(behind_a_choice(WORDS)), f'","b":["{WORDS[:50]}', '{"a":"x'),
    "rules that chain": (LARK, "once upon a time " * 3, ""),
    "rules that ask for it": (f'%llguidance {{"no_forcing": false}}\n{LARK}', "once upon a time " * 3, ""),
    "rules in a list": (json.dumps({"grammars": [{"lark_grammar": LARK}]}), "once upon a time " * 3, ""),
}


@pytest.mark.parametrize(("grammar", "text", "before"), ENDLESS.values(), ids=ENDLESS)
def test_text_without_end_is_looked_for_in_small_pieces(
    vocabulary: llguidance.LLTokenizer, grammar: str, text: str, before: str
) -> None:
    start = time.process_time()
    followed = matcher(vocabulary, grammar)
    for token_id in vocabulary.tokenize_str(before):
        assert followed.accept(token_id) is None
    forced = followed.forced_token_ids(1 << 30)
    assert vocabulary.decode_str(forced).startswith(text)
    assert len(vocabulary.decode_bytes(forced)) <= MAX_FORCED_BYTES
    for _ in range(3):  # piece for piece
        forced = followed.forced_token_ids(1 << 30)
        assert len(forced) > 50
        assert [followed.accept(token_id) for token_id in forced] == [None] * len(forced)
    masks = np.full((9, VOCAB_SIZE // 32), -1, np.int32)
    followed.fill_masks(tuple(followed.copy().forced_token_ids(8)), masks)
    assert np.bitwise_count(masks.view(np.uint32)).sum(axis=1).tolist() == [1] * 9
    assert time.process_time() - start < TIME_LIMIT_S


class Counted:
    """A matcher of the library and its copies, whose masks are counted."""

    def __init__(self, matcher: llguidance.LLMatcher, masks: list[int]) -> None:
        self._matcher = matcher
        self._masks = masks

    def deep_copy(self) -> "Counted":
        return Counted(self._matcher.deep_copy(), self._masks)

    def unsafe_compute_mask_ptr(self, pointer: int, num_bytes: int) -> None:
        self._masks.append(num_bytes)
        self._matcher.unsafe_compute_mask_ptr(pointer, num_bytes)

    def __getattr__(self, name: str) -> object:
        return getattr(self._matcher, name)


def look(vocabulary: llguidance.LLTokenizer, grammar: str, before: bytes = b"") -> tuple[str, int, int]:
    """The text that is forced behind another, in how many masks it was found, and how many ids the mask allows."""
    inner = llguidance.LLMatcher(vocabulary, f'%llguidance {{"no_forcing": true}}\n{grammar}', log_level=0)
    for byte in before:
        assert inner.consume_token(vocabulary.tokenize_bytes(bytes([byte]))[0])
    masks: list[int] = []
    mask = np.full(-(-vocabulary.vocab_size // 32), -1, np.int32)
    forced = Forcing(vocabulary).fill(Counted(inner, masks), [], mask)  # type: ignore[arg-type]
    assert not inner.is_error()
    assert inner.validate_tokens(forced) == len(forced)
    return vocabulary.decode_str(forced), len(masks), int(np.bitwise_count(mask.view(np.uint32)).sum())


def test_a_walk_takes_a_mask_a_byte_and_ends(vocabulary: llguidance.LLTokenizer) -> None:
    text, num_masks, num_allowed = look(vocabulary, f'start: "{WORDS}"')
    assert WORDS.startswith(text)
    assert MAX_FORCED_BYTES - 20 < len(text) <= MAX_FORCED_BYTES
    assert (num_masks, num_allowed) == (MAX_FORCED_BYTES + 1, 1)


def test_where_there_is_a_choice_one_mask_is_enough(vocabulary: llguidance.LLTokenizer) -> None:
    assert look(vocabulary, "start: /[a-z]+/")[:2] == ("", 1)
    assert look(vocabulary, "start: /a*/", b"a")[:2] == ("", 1)  # or the end


@pytest.mark.parametrize(
    ("grammar", "before", "forced"),
    [
        ('start: "yes it is"', b"", "yes it is"),  # nothing can follow that would be one token with its end
        ('start: "x" | "yes it is" /[a-z]*/', b"y", "es it"),  # "is" may be the beginning of a longer token
        ('start: "once" <|im_end|> "upon"', b"", ""),
        ('start: "é" ("é" | "è")', b"", "é"),  # two bytes and the first half of two more
        ('start: "é, once upon a time" /[0-9]/', "é".encode()[:1], ""),  # not from within a character
    ],
)
def test_what_is_forced_is_cut_as_the_tokenizer_cuts_it(
    vocabulary: llguidance.LLTokenizer, grammar: str, before: bytes, forced: str
) -> None:
    assert look(vocabulary, grammar, before)[0] == forced


def test_the_ids_before_have_a_say_in_how_text_is_cut(vocabulary: llguidance.LLTokenizer) -> None:
    """The whole is [ { " id, and without the bracket it is {" id."""
    followed = matcher(vocabulary, 'start: "[" "{\\"id\\":1" /[a-z]/')
    whole = followed.forced_token_ids(9)
    assert followed.accept(whole[0]) is None
    again = followed.copy()
    again._forced.clear()
    assert again.forced_token_ids(9) == followed.forced_token_ids(9) == whole[1:]


def test_text_that_the_vocabulary_cannot_write_is_forced_up_to_there() -> None:
    document = json.loads((DEMO_MODEL / "tokenizer.json").read_text())
    model = document["model"]
    model["vocab"] = {text: i for text, i in model["vocab"].items() if "z" not in text}
    model["merges"] = [pair for pair in model["merges"] if "z" not in "".join(pair)]
    lacking = llguidance.LLTokenizer(json.dumps(document), eos_token=[0])
    text, _, num_allowed = look(lacking, 'start: "once upon a zebra" /[0-9]/')
    assert "once upon a ".startswith(text)
    assert text.startswith("once upon")
    assert num_allowed == 1
