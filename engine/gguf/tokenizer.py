"""Turns the vocabulary in the metadata of a GGUF file into a tokenizer.json and a tokenizer_config.json.

Kinds: byte-level BPE, whose merges are in the file and whose way to split text has a name there; SentencePiece's BPE,
whose merges follow from the scores of pieces (llama) or are there (gemma4); unigram (t5) and WordPiece (bert). Ids
equal those of the tokenizer.json that the model came with. Names of ways to split: github.com/ggml-org/llama.cpp,
`convert_hf_to_gguf_update.py` and `src/llama-vocab.cpp`.
"""

from collections.abc import Callable, Iterable

from weft.engine.gguf.file import GgufError, GgufModel
from weft.engine.gguf.other_vocabularies import describe_unigram, describe_wordpiece
from weft.engine.gguf.splits import GPT2, GPT2_WITH_DIGITS, QWEN2, SPLITS, WHOLE_FIRST, WITH_BOS
from weft.engine.wire.bpe import TooManyTokensError, find_merges

Json = dict[str, object]

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
"""Types of tokens that are not bytes."""


def describe_tokenizer(model: GgufModel) -> tuple[Json, Json]:
    """Contents of tokenizer.json and tokenizer_config.json.

    Raises:
        GgufError: The file has no tokenizer, or one of a kind that is not supported.
    """
    kind, tokens = model.optional("tokenizer.ggml.model", str), model.values("tokenizer.ggml.tokens", str)
    if kind is None or not tokens:
        raise GgufError("the file has no tokenizer (tokenizer.ggml.model and tokenizer.ggml.tokens)")
    if kind not in _KINDS:
        raise GgufError(f"tokenizers of kind {kind} are not supported (supported: {', '.join(_KINDS)})")
    types = model.values("tokenizer.ggml.token_type", int) or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise GgufError(f"{len(types)} types in tokenizer.ggml.token_type for {len(tokens)} tokens")
    ids: dict[str, int] = {}
    for index, token in enumerate(tokens):
        ids[token if token not in ids else f"{token}[{index}]"] = index  # a second one is never made of text
    parts = _KINDS[kind](model, ids, types)
    special = {name: _named(model, key, tokens) for name, key in _SPECIAL.items()}
    takes_spaces = kind == "llama" and model.optional("general.architecture", str) == "phi3"
    added = [
        {**_ADDED, "id": index, "content": token, "special": types[index] != _USER_DEFINED}
        | {"rstrip": takes_spaces and token not in _PHI3_PLAIN}
        for token, index in ids.items()
        if types[index] in (_CONTROL, _USER_DEFINED) or (types[index] == _UNKNOWN and token)
    ]
    adds_bos = kind == "llama" or (kind == "gpt2" and model.optional("tokenizer.ggml.pre", str) in WITH_BOS)
    around = _around(model, special, ids, adds_bos, adds_eos=kind == "t5")
    parts = {"added_tokens": added, "post_processor": around, **parts}
    config: Json = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    templates = _templates(model)
    if templates:
        config["chat_template"] = templates
    return {"version": "1.0", **parts}, config | {name: token for name, token in special.items() if token is not None}


_SPECIAL = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
_PHI3_PLAIN = ("<unk>", "<s>", "<|endoftext|>")
"""Tokens of Phi-3 that do not take the white space behind them."""
_ADDED: Json = {"single_word": False, "lstrip": False, "normalized": False}


def _named(model: GgufModel, key: str, tokens: list[str]) -> str | None:
    index = model.optional(key, int)
    return tokens[index] if index is not None and 0 <= index < len(tokens) else None


def _byte_level(model: GgufModel, ids: dict[str, int], types: list[int]) -> Json:
    name = model.optional("tokenizer.ggml.pre", str) or "default"
    merges = model.values("tokenizer.ggml.merges", str)
    if not merges:
        raise GgufError("the tokenizer has no tokenizer.ggml.merges")
    if name not in (*SPLITS, *GPT2, *GPT2_WITH_DIGITS):
        raise GgufError(f"tokenizer.ggml.pre is {name}, which is not supported (supported: "
                        f"{', '.join((*SPLITS, *GPT2, *GPT2_WITH_DIGITS))}). Take a newer file of the model, or its "
                        "safetensors")  # fmt: skip
    octets: Json = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    patterns = SPLITS.get(name, ())
    before: list[Json] = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in patterns
    ]
    before += [{"type": "Digits", "individual_digits": True}] * (name in GPT2_WITH_DIGITS)
    before.append(octets | {"use_regex": not patterns})
    return {
        "normalizer": {"type": "NFC"} if QWEN2 in patterns else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": before},
        "decoder": octets | {"use_regex": True},
        "model": _bpe(ids, [merge.split(" ") for merge in merges], ignore_merges=name in WHOLE_FIRST),
    }


def _sentencepiece(model: GgufModel, ids: dict[str, int], types: list[int]) -> Json:
    scores = model.values("tokenizer.ggml.scores", float)
    if len(scores) != len(types):
        raise GgufError(f"{len(scores)} scores in tokenizer.ggml.scores for {len(types)} tokens")
    has_prefix = model.optional("tokenizer.ggml.add_space_prefix", bool) is not False
    unknown = _named(model, _SPECIAL["unk_token"], list(ids))
    spaces: Json = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    prefix = [{"type": "Prepend", "prepend": "▁"}] * has_prefix
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, spaces]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": _decoders(int(has_prefix))},
        "model": _bpe(ids, _merges(ids, types, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True),
    }


def _gemma4(model: GgufModel, ids: dict[str, int], types: list[int]) -> Json:
    """SentencePiece's way to write text, with merges; lines and the ends of lines are apart."""
    merges = model.values("tokenizer.ggml.merges", str)
    if not merges:
        raise GgufError("the tokenizer has no tokenizer.ggml.merges")
    pairs = [[merge[:cut], merge[cut + 1 :]] for merge in merges if (cut := merge.find(" ", 1)) > 0]
    unknown = _named(model, _SPECIAL["unk_token"], list(ids))
    lines: Json = {"type": "Split", "pattern": {"Regex": r"[^\n]+|\n+"}, "behavior": "Isolated", "invert": False}
    return {
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": lines,
        "decoder": {"type": "Sequence", "decoders": _decoders(num_spaces=0)},
        "model": _bpe(ids, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True),
    }


def _decoders(num_spaces: int) -> list[Json]:
    return [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        *[{"type": "Strip", "content": " ", "start": num_spaces, "stop": 0}] * bool(num_spaces),
    ]


def _merges(ids: dict[str, int], types: list[int], scores: list[float]) -> list[list[str]]:
    try:
        found = find_merges({token: -scores[index] for token, index in ids.items() if types[index] == _NORMAL})
    except TooManyTokensError as error:
        raise GgufError(f"tokenizer.ggml.tokens has {str(error).removeprefix('tokens of ')}") from None
    return [list(merge) for merge in found]


def _bpe(ids: dict[str, int], merges: list[list[str]], **more: object) -> Json:
    for merge in merges:
        if len(merge) != 2 or not all(part in ids for part in (*merge, "".join(merge))):
            raise GgufError(
                f"merge {' '.join(merge)[:60]!r} in tokenizer.ggml.merges is not one of two tokens to a third"
            )
    return {"type": "BPE", "vocab": ids, "merges": merges, **more}


def _around(
    model: GgufModel, special: dict[str, str | None], ids: dict[str, int], adds_bos: bool, adds_eos: bool
) -> Json | None:
    """What is put around a prompt."""
    if (given := model.optional("tokenizer.ggml.add_bos_token", bool)) is not None:
        adds_bos = given
    first = [special["bos_token"]] * adds_bos
    if (given := model.optional("tokenizer.ggml.add_eos_token", bool)) is not None:
        adds_eos = given
    last = [special["eos_token"]] * adds_eos
    around = [token for token in (*first, *last) if token is not None]
    if not around:
        return None
    single, pair = ([_piece(first), *({"Sequence": {"id": name, "type_id": 0}} for name in names), _piece(last)]
                    for names in ("A", "AB"))  # fmt: skip
    return {
        "type": "TemplateProcessing",
        "single": [piece for piece in single if piece],
        "pair": [piece for piece in pair if piece],
        "special_tokens": {token: {"id": token, "ids": [ids[token]], "tokens": [token]} for token in around},
    }


def _piece(tokens: Iterable[str | None]) -> Json | None:
    named: list[Json] = [{"SpecialToken": {"id": token, "type_id": 0}} for token in tokens if token is not None]
    return named[0] if named else None


def _templates(model: GgufModel) -> str | list[Json] | None:
    """The chat template, or all of them if there are several."""
    default, prefix = model.optional("tokenizer.chat_template", str), "tokenizer.chat_template."
    named = {key.removeprefix(prefix): model.value(key, str) for key in model.metadata if key.startswith(prefix)}
    if not named:
        return default
    all_of_them = {"default": default, **named} if default is not None else named
    return [{"name": name, "template": template} for name, template in all_of_them.items()]


_KINDS: dict[str, Callable[[GgufModel, dict[str, int], list[int]], Json]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
    "gemma4": _gemma4,
    "t5": describe_unigram,
    "bert": describe_wordpiece,
}
