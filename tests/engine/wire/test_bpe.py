"""tekken.json against byte pair encoding as tiktoken defines it, which mistral-common uses."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import regex

from tests.odd_lines import odd_lines
from tests.tokenizers_for_tests import training_text
from weft.engine.wire.bpe import TekkenError, convert_tekken

PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def tokens() -> list[bytes]:
    """Tokens by rank: all bytes, then words of the text grown from their beginning."""
    found = dict.fromkeys(bytes([byte]) for byte in range(256))
    for word in regex.findall(PATTERN, " ".join([*training_text()[:40], *odd_lines()[:150]])):
        data = word.encode()
        found.update(dict.fromkeys(data[:size] for size in range(2, min(len(data), 24) + 1)))
    return list(found)


def encode(text: str, ranks: dict[bytes, int]) -> list[int]:
    """Merge the neighbours whose union has the lowest rank; a whole piece that is a token is taken as it is."""
    token_ids = []
    for word in regex.findall(PATTERN, text):
        parts = [bytes([byte]) for byte in word.encode()]
        while len(parts) > 1 and word.encode() not in ranks:
            unions = [(ranks.get(parts[i] + parts[i + 1], len(ranks)), i) for i in range(len(parts) - 1)]
            rank, at = min(unions)
            if rank == len(ranks):
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        token_ids += [ranks[word.encode()]] if word.encode() in ranks else [ranks[part] for part in parts]
    return token_ids


def content(given: list[bytes], **changes: Any) -> dict[str, Any]:
    config = {
        "pattern": PATTERN,
        "num_vocab_tokens": len(given),
        "default_vocab_size": len(given) + 24,
        "default_num_special_tokens": 24,
        "version": "v3",
    }
    vocab = [{"rank": i, "token_bytes": base64.b64encode(t).decode(), "token_str": None} for i, t in enumerate(given)]
    controls = [{"rank": i, "token_str": text, "is_control": True} for i, text in enumerate(("<unk>", "<s>", "[A]"))]
    whole = {"config": config | changes, "vocab": vocab, "special_tokens": controls[::-1]}
    return whole


def written(folder: Path, whole: dict[str, Any]) -> Path:
    file = folder / "tekken.json"
    file.write_text(json.dumps(whole))
    return file


@pytest.mark.parametrize("names", [True, False], ids=["named", "of 2024"])
def test_ids(tmp_path: Path, names: bool) -> None:
    """Files of 2024 do not name the special tokens; they asked for a library that nothing installs."""
    given = tokens()
    whole = content(given)
    if not names:
        del whole["special_tokens"]
    backend, special = convert_tekken(written(tmp_path, whole))
    ranks = {token: rank for rank, token in enumerate(given)}
    for line in odd_lines():
        if not any(text in line for text in ("<unk>", "<s>", "</s>", "INST]", "<pad>", "[A")):
            ids = backend.encode(line).ids
            assert ids == [24 + rank for rank in encode(line, ranks)], line
            assert backend.decode(ids) == line
    assert backend.encode("x[A]<SPECIAL_23><SPECIAL_3>").ids[1:] == (
        [2, 23, 3] if names else [*backend.encode("[A]").ids, 23, *backend.encode("<SPECIAL_3>").ids]
    )
    assert special == {"bos_token": "<s>", "unk_token": "<unk>"} | (
        {} if names else {"eos_token": "</s>", "pad_token": "<pad>"}
    )
    assert names or [backend.token_to_id(text) for text in ("</s>", "[INST]", "[TOOL_CONTENT]")] == [2, 3, 19]


def test_tokens_beyond_the_size_are_left_out(tmp_path: Path) -> None:
    given = tokens()
    backend, _ = convert_tekken(written(tmp_path, content(given, default_vocab_size=300 + 24)))
    assert backend.get_vocab_size() == 300 + 24
    line = training_text()[0]
    assert backend.encode(line).ids == [24 + rank for rank in encode(line, {t: i for i, t in enumerate(given[:300])})]


def test_what_is_not_known_is_refused(tmp_path: Path) -> None:
    given = tokens()[:300]
    newer = content(given, version="v11")
    del newer["special_tokens"]
    twice = content([*given, given[-1]])
    gap = content(given)
    gap["vocab"][7]["rank"] = 8
    gap_of_names = content(given)
    gap_of_names["special_tokens"][0]["rank"] = 9
    faults = {
        "tekken.json of version v11 must have special_tokens": newer,
        "tekken.json has a token twice, or lacks one for a byte": twice,
        "the ranks of tekken.json are not 0 to 299 in their order": gap,
        "special_tokens of tekken.json must have the ranks from 0 on": gap_of_names,
        "tekken.json names 3 special tokens, each once, in place of 2": content(
            given, default_num_special_tokens=2, default_vocab_size=302
        ),
    }
    for fault, whole in faults.items():
        with pytest.raises(TekkenError) as caught:
            convert_tekken(written(tmp_path, whole))
        assert str(caught.value) == fault
