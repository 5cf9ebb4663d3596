"""Turns the vocabulary in the metadata of a GGUF file into a tokenizer.json and a tokenizer_config.json.

Kinds: byte-level BPE, whose merges are in the file and whose way to split text has a name there, and SentencePiece's
BPE, whose merges follow from the scores of pieces. Ids equal those of the tokenizer.json that the model came with.
Names of ways to split: github.com/ggml-org/llama.cpp, `convert_hf_to_gguf_update.py` and `src/llama-vocab.cpp`.
"""

from collections.abc import Iterable

from weft.engine.gguf.file import GgufError, GgufModel

Json = dict[str, object]

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
"""Types of tokens that are not bytes."""

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASES = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_REST_OF_CASES = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _WORDS + r"|\p{N}{1,3}" + _REST
_QWEN2 = _WORDS + r"|\p{N}" + _REST
_TEKKEN = _CASES % ("", "") + r"|\p{N}" + _REST_OF_CASES
_GPT4O = _CASES % (("(?i:'s|'t|'re|'ve|'m|'ll|'d)?",) * 2) + r"|\p{N}{1,3}" + _REST_OF_CASES

_SPLITS = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "smaug-bpe", "dbrx", "lfm2"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "kormo", "f2llmv2"), (_QWEN2,)),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), (_GPT4O,)),
    "midm-2.0": (_LLAMA3,),
    "tekken": (_TEKKEN,),
    "seed-coder": (_WORDS + r"|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+",),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}"),
    "viking": (" ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+", r"\p{N}"),
    "minicpm5": (r"\p{N}{1,3}", _WORDS + r"|\p{N}+" + _REST),
}
"""Patterns, each of which divides what those before it left; a match is a piece, and so is what lies between two."""
_GPT2 = ("gpt-2", "phi-2", "mpt", "olmo", "jina-es", "jina-de", "roberta-bpe", "a.x-4.0", "mellum", "trillion")
_GPT2_WITH_DIGITS = ("smollm", "starcoder", "refact", "codeshell", "command-r", "exaone", "minerva-7b")
_WHOLE_FIRST = ("llama-bpe", "llama3", "llama-v3", "midm-2.0", "minicpm5", "tekken", "llama4")
"""Where a piece of text that is a token as it is need not be reached by merges."""
_WITH_BOS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2", "midm-2.0", "tekken")
"""Where a prompt has a token at its beginning unless the file says otherwise, as with SentencePiece's vocabularies."""
_MAX_PIECE, _MAX_PIECES = 512, 1 << 23
"""Characters: of the longest piece that SentencePiece's trainer makes, and of all pieces that are cut up here."""


def describe_tokenizer(model: GgufModel) -> tuple[Json, Json]:
    """Contents of tokenizer.json and tokenizer_config.json.

    Raises:
        GgufError: The file has no tokenizer, or one of a kind that is not supported.
    """
    kind, tokens = model.optional("tokenizer.ggml.model", str), model.values("tokenizer.ggml.tokens", str)
    if kind is None or not tokens:
        raise GgufError("the file has no tokenizer (tokenizer.ggml.model and tokenizer.ggml.tokens)")
    if kind not in ("gpt2", "llama"):
        raise GgufError(f"tokenizers of kind {kind} are not supported (supported: gpt2, llama)")
    types = model.values("tokenizer.ggml.token_type", int) or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise GgufError(f"{len(types)} types in tokenizer.ggml.token_type for {len(tokens)} tokens")
    ids: dict[str, int] = {}
    for index, token in enumerate(tokens):
        ids[token if token not in ids else f"{token}[{index}]"] = index  # a second one is never made of text
    parts = _byte_level(model, ids) if kind == "gpt2" else _sentencepiece(model, ids, types)
    special = {name: _named(model, key, tokens) for name, key in _SPECIAL.items()}
    takes_spaces = kind == "llama" and model.optional("general.architecture", str) == "phi3"
    added = [
        {**_ADDED, "id": index, "content": token, "special": types[index] != _USER_DEFINED}
        | {"rstrip": takes_spaces and token not in _PHI3_PLAIN}
        for token, index in ids.items()
        if types[index] in (_CONTROL, _USER_DEFINED) or (types[index] == _UNKNOWN and token)
    ]
    adds_bos = kind == "llama" or model.optional("tokenizer.ggml.pre", str) in _WITH_BOS
    parts |= {"added_tokens": added, "post_processor": _around(model, special, ids, adds_bos)}
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


def _byte_level(model: GgufModel, ids: dict[str, int]) -> Json:
    name = model.optional("tokenizer.ggml.pre", str) or "missing"
    merges = model.values("tokenizer.ggml.merges", str)
    if not merges:
        raise GgufError("the tokenizer has no tokenizer.ggml.merges")
    if name not in (*_SPLITS, *_GPT2, *_GPT2_WITH_DIGITS):
        raise GgufError(f"tokenizer.ggml.pre is {name}, which is not supported (supported: "
                        f"{', '.join((*_SPLITS, *_GPT2, *_GPT2_WITH_DIGITS))}). Take a newer file of the model, or its "
                        "safetensors")  # fmt: skip
    octets: Json = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    patterns = _SPLITS.get(name, ())
    before: list[Json] = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in patterns
    ]
    before += [{"type": "Digits", "individual_digits": True}] * (name in _GPT2_WITH_DIGITS)
    before.append(octets | {"use_regex": not patterns})
    return {
        "normalizer": {"type": "NFC"} if _QWEN2 in patterns else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": before},
        "decoder": octets | {"use_regex": True},
        "model": _bpe(ids, [merge.split(" ") for merge in merges], ignore_merges=name in _WHOLE_FIRST),
    }


def _sentencepiece(model: GgufModel, ids: dict[str, int], types: list[int]) -> Json:
    scores = model.values("tokenizer.ggml.scores", float)
    if len(scores) != len(types):
        raise GgufError(f"{len(scores)} scores in tokenizer.ggml.scores for {len(types)} tokens")
    has_prefix = model.optional("tokenizer.ggml.add_space_prefix", bool) is not False
    unknown = _named(model, _SPECIAL["unk_token"], list(ids))
    spaces: Json = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    prefix = [{"type": "Prepend", "prepend": "▁"}] * has_prefix
    decoders: list[Json] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        *[{"type": "Strip", "content": " ", "start": 1, "stop": 0}] * has_prefix,
    ]
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, spaces]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(ids, _merges(ids, types, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True),
    }


def _merges(ids: dict[str, int], types: list[int], scores: list[float]) -> list[list[str]]:
    """Every way to make a piece of two others; those of the piece with the best score first. Long ones stay unmade."""
    pieces = {token: index for token, index in ids.items() if types[index] == _NORMAL and len(token) <= _MAX_PIECE}
    if (size := sum(map(len, pieces))) > _MAX_PIECES:
        raise GgufError(f"tokenizer.ggml.tokens has {size:,} characters, at most {_MAX_PIECES:,} are supported")
    ranked = []
    for token, index in pieces.items():
        for cut in range(1, len(token)):
            if token[:cut] in pieces and token[cut:] in pieces:
                ranked.append((-scores[index], index, token[:cut], token[cut:]))
    return [[first, second] for _, _, first, second in sorted(ranked, key=lambda merge: merge[:2])]


def _bpe(ids: dict[str, int], merges: list[list[str]], **more: object) -> Json:
    for merge in merges:
        if len(merge) != 2 or not all(part in ids for part in (*merge, "".join(merge))):
            raise GgufError(
                f"merge {' '.join(merge)[:60]!r} in tokenizer.ggml.merges is not one of two tokens to a third"
            )
    return {"type": "BPE", "vocab": ids, "merges": merges, **more}


def _around(model: GgufModel, special: dict[str, str | None], ids: dict[str, int], adds_bos: bool) -> Json | None:
    """What is put around a prompt."""
    if (given := model.optional("tokenizer.ggml.add_bos_token", bool)) is not None:
        adds_bos = given
    first = [special["bos_token"]] * adds_bos
    last = [special["eos_token"]] * bool(model.optional("tokenizer.ggml.add_eos_token", bool))
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
