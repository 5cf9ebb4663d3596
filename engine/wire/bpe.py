"""BPE vocabularies that are kept without their merges: finds these, and converts Mistral's `tekken.json`.

Tokens have scores (SentencePiece) or ranks (tiktoken). Such an encoder joins the two neighbours that make the best
token, whichever they are, so every way to make a token of two others is a merge. Long tokens stay unmade, and the
number of characters to cut is bounded.

`tekken.json` has tokens by rank, and the ids of special tokens stand before them. Files of 2024 do not name the special
tokens: all of them have the same. Ids are those of mistral-common. Facts: github.com/mistralai/mistral-common,
`tekken.py`.
"""

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

MAX_TOKEN = 512
"""Characters of the longest token that SentencePiece's trainer makes."""
MAX_CHARACTERS = 1 << 23

_OF_2024 = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
_VERSIONS_OF_2024 = ("v1", "v2", "v3", "v7")
_NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


class TooManyTokensError(ValueError):
    """The tokens have more than `MAX_CHARACTERS`; one line."""


def find_merges(order: Mapping[str, float]) -> list[tuple[str, str]]:
    """All merges, the first one to be applied first.

    Args:
        order: Every token that merges make or take, with its place: those with the least number are made first.

    Raises:
        TooManyTokensError: They are not cut up.
    """
    tokens = {token: place for token, place in order.items() if len(token) <= MAX_TOKEN}
    if (size := sum(map(len, tokens))) > MAX_CHARACTERS:
        raise TooManyTokensError(f"tokens of {size:,} characters, at most {MAX_CHARACTERS:,} are supported")
    ranked = [
        (place, index, token[:cut], token[cut:])
        for index, (token, place) in enumerate(tokens.items())
        for cut in range(1, len(token))
        if token[:cut] in tokens and token[cut:] in tokens
    ]
    return [(first, second) for _, _, first, second in sorted(ranked, key=lambda merge: merge[:2])]


class TekkenError(Exception):
    """The file cannot be converted; one line."""


def convert_tekken(file: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """The tokenizer, and its special tokens by name.

    Raises:
        TekkenError: The file is of a kind that is not known.
    """
    content = json.loads(file.read_bytes())
    config = content["config"]
    special = _special_tokens(content)
    num_ranks = config["default_vocab_size"] - len(special)
    entries = content["vocab"][:num_ranks]
    if [entry["rank"] for entry in entries] != list(range(num_ranks)):
        raise TekkenError(f"the ranks of tekken.json are not 0 to {num_ranks - 1} in their order")
    alphabet = byte_alphabet()
    ranks = {
        "".join(alphabet[byte] for byte in base64.b64decode(entry["token_bytes"])): entry["rank"] for entry in entries
    }
    if len(ranks) < num_ranks or not set(alphabet) <= ranks.keys():
        raise TekkenError("tekken.json has a token twice, or lacks one for a byte")
    vocab = {token: len(special) + rank for token, rank in ranks.items()}
    names = {text: index for index, text in enumerate(special)}
    merges = find_merges(ranks)
    # A token that the pattern leaves whole is taken as it is, reached by merges or not.
    backend = tokenizers.Tokenizer(models.BPE(vocab=names | vocab, merges=merges, ignore_merges=True))
    octets = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Split(Regex(config["pattern"]), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, octets])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    return backend, {key: text for key, text in _NAMES.items() if text in names}


def _special_tokens(content: Mapping[str, Any]) -> list[str]:
    """All of them by id; those that no name is given to are called `<SPECIAL_20>` and so on."""
    config, given = content["config"], content.get("special_tokens")
    version = config.get("version")
    if given is None and version not in _VERSIONS_OF_2024:
        raise TekkenError(f"tekken.json of version {version} must have special_tokens")
    named = _OF_2024 if given is None else tuple(token["token_str"] for token in sorted(given, key=lambda t: t["rank"]))
    if given is not None and sorted(token["rank"] for token in given) != list(range(len(given))):
        raise TekkenError("special_tokens of tekken.json must have the ranks from 0 on")
    num_tokens = config.get("default_num_special_tokens", len(named))
    if len(set(named)) < len(named) or len(named) > num_tokens:
        raise TekkenError(f"tekken.json names {len(named)} special tokens, each once, in place of {num_tokens}")
    return [*named, *(f"<SPECIAL_{index}>" for index in range(len(named), num_tokens))]


def byte_alphabet() -> list[str]:
    """The printable character for each byte, as GPT-2 has it: itself where it is printable."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
