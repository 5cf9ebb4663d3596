"""Turns the vocabulary in the metadata of a GGUF file into a tokenizer.json and a tokenizer_config.json.

Kinds: byte-level BPE, whose merges are in the file and whose way to split text has a name there; SentencePiece's BPE,
whose merges follow from the scores of pieces (llama) or are there (gemma4); unigram (t5) and WordPiece (bert). Ids
equal those of the tokenizer.json that the model came with. Names of ways to split: github.com/ggml-org/llama.cpp,
`convert_hf_to_gguf_update.py` and `src/llama-vocab.cpp`.
"""

from collections.abc import Callable, Iterable

from weft.engine.gguf.file import GgufError, GgufModel
from weft.engine.gguf.other_vocabularies import describe_unigram, describe_wordpiece
from weft.engine.wire.bpe import TooManyTokensError, find_merges

Json = dict[str, object]

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
"""Types of tokens that are not bytes."""

# Patterns by which texts are divided before merges, by the name in `tokenizer.ggml.pre`; a file without a name has
# llama.cpp's default.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASES = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_REST_OF_CASES = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _WORDS + r"|\p{N}{1,3}" + _REST
QWEN2 = _WORDS + r"|\p{N}" + _REST
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TEKKEN = _CASES % ("", "") + r"|\p{N}" + _REST_OF_CASES
_GPT4O = _CASES % (("(?i:'s|'t|'re|'ve|'m|'ll|'d)?",) * 2) + r"|\p{N}{1,3}" + _REST_OF_CASES

_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
"""Of the alphabets that DeepSeek's first tokenizer knew."""

SPLITS = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "smaug-bpe", "dbrx", "lfm2"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "kormo", "f2llmv2"), (QWEN2,)),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), (_GPT4O,)),
    "midm-2.0": (_LLAMA3,),
    "qwen35": (QWEN35,),
    "deepseek-llm": (
        r"[\r\n]",
        rf"\s?[{_DEEPSEEK_LETTERS}]+",
        r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
        r"\p{N}+",
    ),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2_PATTERN, "[0-9][0-9][0-9]"),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_PATTERN, r"\p{N}+", "[0-9][0-9][0-9]"),
    "tekken": (_TEKKEN,),
    "seed-coder": (_WORDS + r"|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+",),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}"),
    "viking": (" ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+", r"\p{N}"),
    "minicpm5": (r"\p{N}{1,3}", _WORDS + r"|\p{N}+" + _REST),
}
"""Patterns, each of which divides what those before it left; a match is a piece, and so is what lies between two."""
GPT2 = ("gpt-2", "phi-2", "mpt", "olmo", "jina-es", "jina-de", "roberta-bpe", "a.x-4.0", "mellum", "trillion")
GPT2_WITH_DIGITS = ("smollm", "starcoder", "refact", "codeshell", "command-r", "exaone", "minerva-7b")
WHOLE_FIRST = ("llama-bpe", "llama3", "llama-v3", "midm-2.0", "minicpm5", "tekken", "llama4")
"""Where a piece of text that is a token as it is need not be reached by merges."""
WITH_BOS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2", "midm-2.0", "tekken")
"""Where a prompt has a token at its beginning unless the file says otherwise, as with SentencePiece's vocabularies."""


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
            message = f"merge {' '.join(merge)[:60]!r} in tokenizer.ggml.merges is not one of two tokens to a third"
            raise GgufError(message)
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
