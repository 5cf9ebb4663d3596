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
from typing import Any

from weft.engine.gguf.config import describe
from weft.engine.gguf.file import GgufError, GgufModel, parts, read_model
from weft.engine.gguf.mmproj import add_mmproj
from weft.engine.gguf.projector import Json
from weft.engine.gguf.tokenizer import describe_tokenizer
from weft.engine.wire.machine import user_folder

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
_USUAL_SAMPLING = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
"""llama.cpp's own, for what a file does not say: all of the distribution makes small models babble. They stand apart
under `assumed`, since other APIs have their own."""
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


def made_folder(file: Path, mmproj: Path | None = None) -> Path:
    """The folder of a file; what is not there yet is made, and what was made of older files long ago goes.

    Args:
        mmproj: The file of what sees beside the model; None: the folder is that of the text alone.

    Raises:
        GgufError: A file cannot be served; see `read_model`, `describe`, `describe_tokenizer` and `add_mmproj`.
    """
    file = Path(os.path.abspath(file))
    try:
        seeing = parts(Path(os.path.abspath(mmproj))) if mmproj else ()
        files = *parts(file), *seeing
        versions = [f"{stat.st_size} {stat.st_mtime_ns}" for stat in map(Path.stat, files)]
        state = _hash(_code(), *map(str, files), *versions)
        made = user_folder("XDG_CACHE_HOME", ".cache") / "gguf" / f"{_hash(str(file))}-{state}" / stem(file.name)
        if not made.is_dir():
            _make(read_model(file), versions, made, read_model(seeing[0]) if seeing else None)
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


def _make(model: GgufModel, versions: list[str], made: Path, mmproj: GgufModel | None) -> None:
    config = describe(model, versions)
    tokenizer, tokenizer_config = describe_tokenizer(model)
    contents: dict[str, Json] = {
        "config.json": config,
        "generation_config.json": _generation(model),
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": tokenizer_config,
        **_pooling(model),
    }
    if mmproj is not None:
        add_mmproj(contents, model, mmproj)
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


def _pooling(model: GgufModel) -> dict[str, Any]:
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
    assumed = {name: value for name, value in _USUAL_SAMPLING.items() if name not in given}
    return {"eos_token_id": list(dict.fromkeys(ids)), **given, "assumed": assumed}
