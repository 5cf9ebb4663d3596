"""Makes a folder in Hugging Face layout for a GGUF file, without its weights, which stay where they are.

The metadata becomes config.json, the vocabulary in it tokenizer.json, and so on. The folder is kept in the user's
cache, under a hash of the files' paths, sizes and times, and of the code that makes it. Whole folders only ever take
the place, so starts at the same time do not disturb each other.
"""

import contextlib
import functools
import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from weft.engine.gguf.config import describe
from weft.engine.gguf.file import GgufError, GgufModel, parts, read_model

Json = dict[str, object]

_UNUSED_S = 30 * 86_400.0
"""A folder of an older file or an older Weft that no start has used for so long goes: a server may still need it."""
_PART = re.compile(r"-\d{5}-of-\d{5}$")
_NO_MODEL = re.compile(r"mmproj|^imatrix|imatrix\.gguf$", re.IGNORECASE)
DEFAULT_TAG = "Q4_K_M"
_SAMPLING = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
_POOLING = {1: "mean", 2: "cls", 3: "lasttoken"}
_ENDS = (
    *("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<end_of_turn>", "<|endoftext|>"),
    *("<|return|>", "<|call|>", "<|end|>"),
)
"""Tokens that end an answer even if the metadata names another; gpt-oss writes the last between messages."""


def stem(name: str) -> str:
    """What a file and the other parts of its model are called."""
    return _PART.sub("", re.sub(r"\.gguf$", "", name, flags=re.IGNORECASE))


def choose(names: Iterable[str], tag: str | None) -> list[str]:
    """Of all files of a folder or repository those of one model.

    Args:
        tag: A type such as Q4_K_M, in the name of the file or of its folder, or the name of a file; None for Q4_K_M,
            or the only model there is.

    Raises:
        GgufError: There is none, or more than one that would do.
    """
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.lower().endswith(".gguf") and not _NO_MODEL.search(name.rpartition("/")[2]):
            models.setdefault(stem(name), []).append(name)
    if not models:
        raise GgufError("there is no GGUF file of a language model")
    if tag is None and len(models) == 1:
        return next(iter(models.values()))
    pattern = re.compile(rf"(^|[-._/]){re.escape(stem(tag or DEFAULT_TAG))}($|/)", re.IGNORECASE)
    found = [model for model in models if pattern.search(model)]
    if len(found) != 1:
        there = ", ".join(found or models)
        raise GgufError(f"{len(found) or 'no'} models are called {tag or DEFAULT_TAG}; there are: {there}")
    return models[found[0]]


def made_folder(file: Path) -> Path:
    """The folder of a file; what is not there yet is made, and what was made of older files long ago goes.

    Raises:
        GgufError: The file cannot be served; see `read_model`, `describe` and `describe_tokenizer`.
    """
    file = Path(os.path.abspath(file))
    try:
        files = parts(file)
        versions = [f"{stat.st_size} {stat.st_mtime_ns}" for stat in map(Path.stat, files)]
        state = _hash(_code(), *map(str, files), *versions)
        made = _cache() / f"{_hash(str(file))}-{state}" / stem(file.name)
        if not made.is_dir():
            _make(read_model(file), versions, made)
        with contextlib.suppress(OSError):  # one that was made beforehand may be read-only
            os.utime(made.parent)
    except OSError as error:
        fault = f"{error}; XDG_CACHE_HOME may name a folder that can be written"
        raise GgufError(f"no folder can be made for the file ({fault})") from None
    return made


def _hash(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


@functools.cache
def _code() -> str:
    """Of this folder, which makes the contents."""
    return _hash(*(file.read_text(encoding="utf-8") for file in sorted(Path(__file__).parent.glob("*.py"))))


def _cache() -> Path:
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if os.path.isabs(given) else Path.home() / ".cache") / "weft" / "gguf"


def _make(model: GgufModel, versions: list[str], made: Path) -> None:
    config = describe(model, versions)
    tokenizer, tokenizer_config = describe_tokenizer(model)
    contents: dict[str, object] = {
        "config.json": config,
        "generation_config.json": _generation(model),
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": tokenizer_config,
        **_pooling(model),
    }
    cache, outer = made.parents[1], made.parent
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        whole = Path(scratch) / "whole"
        for name, content in contents.items():
            path = whole / made.name / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(content), encoding="utf-8")
        try:
            whole.rename(outer)
        except OSError:
            if not made.is_dir():  # else another start was faster
                raise
        for old in cache.glob(f"{outer.name.partition('-')[0]}-*"):
            with contextlib.suppress(FileNotFoundError):  # another start has removed it
                if time.time() - old.stat().st_mtime > _UNUSED_S:
                    old.rename(Path(scratch) / old.name)


def _pooling(model: GgufModel) -> dict[str, object]:
    """The files of sentence-transformers by which a model is one for embeddings; llama.cpp's have length 1."""
    number = model.optional("[ARCH].pooling_type", int) or 0
    if not number:
        return {}
    if number not in _POOLING:
        known = ", ".join(f"{known} {mode}" for known, mode in _POOLING.items())
        raise GgufError(f"pooling_type {number} is not supported (supported: 0 none, {known}). Take the safetensors")
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in kinds.items()]
    return {"modules.json": modules, "1_Pooling/config.json": {"pooling_mode": _POOLING[number]}}


def _generation(model: GgufModel) -> dict[str, object]:
    """The ids that end an answer, and how the model's makers sample."""
    tokens = model.values("tokenizer.ggml.tokens", str)
    named = [model.optional(f"tokenizer.ggml.{name}_token_id", int) for name in ("eos", "eot", "eom")]
    ends = _ENDS[:-1] if model.optional("general.architecture", str) == "gpt-oss" else _ENDS
    found = {token: index for index, token in enumerate(tokens) if token in ends}
    ids = [index for index in (*named, *map(found.get, ends)) if index is not None and 0 <= index < len(tokens)]
    sampling = {name: model.optional(key, float) for name, key in _SAMPLING.items()}
    sampling["top_k"] = model.optional("general.sampling.top_k", int)
    given = {name: value for name, value in sampling.items() if value is not None}
    return {"eos_token_id": list(dict.fromkeys(ids)), **given}


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


_SPECIAL = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
_PHI3_PLAIN = ("<unk>", "<s>", "<|endoftext|>")
"""Tokens of Phi-3 that do not take the white space behind them."""
_ADDED: Json = {"single_word": False, "lstrip": False, "normalized": False}


def describe_tokenizer(model: GgufModel) -> tuple[Json, Json]:
    """Contents of tokenizer.json and tokenizer_config.json.

    Ids equal those of the tokenizer.json that the model came with. There are two kinds: byte-level BPE, whose merges
    are in the file and whose way to split text has a name there, and SentencePiece's BPE, whose merges follow from the
    scores of pieces. Names of ways to split: github.com/ggml-org/llama.cpp, `convert_hf_to_gguf_update.py` and
    `src/llama-vocab.cpp`.

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
