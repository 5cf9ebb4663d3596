"""Finds the tokenizer.json of a checkpoint; makes one where the checkpoint has a tokenizer of another kind.

It is made once and kept in the user's cache, under a hash of the files that it was made from. A child process makes it
(`python -m weft.engine.wire.tokenizer_files`), because that imports transformers, which a server must not. Imports no
torch.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors

from weft.engine.wire.bpe import convert_tekken
from weft.engine.wire.machine import user_folder
from weft.engine.wire.python_tokenizer import convert_python_tokenizer
from weft.engine.wire.sentencepiece_model import convert_sentencepiece, need_sentencepiece

TOKENIZER_KINDS = (
    *(("tokenizer.json",), ("tekken.json",), ("tokenizer.model",), ("vocab.json", "merges.txt")),
    *(("source.spm", "target.spm", "vocab.json"), ("spiece.model",), ("sentencepiece.bpe.model",)),
)
"""Names of the files of each kind of tokenizer, the best first."""

_VERSION = b"2"  # of what `convert` makes
_ALSO_READ = ("tokenizer_config.json", "config.json", "added_tokens.json", "special_tokens_map.json", "vocab.json")
_MOST_SECONDS = 300


class TokenizerFilesError(Exception):
    """There is no tokenizer that can be read; one line."""


def tokenizer_folder(folder: Path) -> Path:
    """The folder with the tokenizer.json: the checkpoint's own, or one in the cache.

    Raises:
        TokenizerFilesError: There is none, and none can be made.
    """
    kind = next((names for names in TOKENIZER_KINDS if all((folder / name).is_file() for name in names)), None)
    if kind is None:
        names = ", ".join(" and ".join(names) for names in TOKENIZER_KINDS)
        raise TokenizerFilesError(f"{folder} has no tokenizer: one of {names}")
    if kind == TOKENIZER_KINDS[0]:
        return folder
    digest = hashlib.sha256(_VERSION)
    versions = [f"{name} {version(name)}" for name in ("tokenizers", "transformers")]
    for part in (*versions, *kind, *_ALSO_READ):
        content = (folder / part).read_bytes() if (folder / part).is_file() else b""
        digest.update(f"{part} {len(content)} ".encode() + content)
    made = user_folder("XDG_CACHE_HOME", ".cache") / "tokenizers" / digest.hexdigest()
    if not made.is_dir():
        _make(folder, kind[0], made)
    return made


def _make(folder: Path, name: str, made: Path) -> None:
    """Convert the files of which one has this name; raises TokenizerFilesError."""
    try:
        _convert_in_child(folder, name, made)
    except OSError as error:
        fault = f"{error}; XDG_CACHE_HOME may name a folder that can be written"
        raise TokenizerFilesError(f"{folder / name} cannot be converted: {fault}") from None
    except subprocess.TimeoutExpired:
        raise TokenizerFilesError(f"{folder / name} was not converted within {_MOST_SECONDS} s") from None


def _convert_in_child(folder: Path, name: str, made: Path) -> None:
    made.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=made.parent) as scratch:
        out = Path(scratch) / "made"
        out.mkdir()
        command = [sys.executable, "-P", "-m", "weft.engine.wire.tokenizer_files", str(folder), name, str(out)]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=_MOST_SECONDS
        )
        if done.returncode != 0:
            reason = (done.stderr.strip().splitlines() or ["the converter was killed"])[-1]
            raise TokenizerFilesError(f"{folder / name}: {reason}")
        try:
            out.rename(made)
        except OSError:
            if not made.is_dir():  # else another process was faster
                raise


def describe(config: Path) -> tuple[bytes, list[Path]]:
    """What a config.json says, and the GGUF files that it leads to; not where these are, and how old.

    Raises:
        OSError, ValueError: It cannot be read.
    """
    fields = json.loads(config.read_bytes())
    quantization = fields.get("quantization_config") or {}
    files = quantization.pop("files", ())
    quantization.pop("versions", None)
    return json.dumps(fields).encode(), [Path(file) for file in files]


_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def special_tokens(declared: Mapping[str, object]) -> tuple[dict[str, str], list[str]]:
    """The special tokens in what configuration files declare: those with a role by its name, and the others.

    A token is its text, or an object with the text as `content`. The others are a list, or an object by name.
    """
    others: list[object] = []
    for given in map(declared.get, ("additional_special_tokens", "extra_special_tokens")):
        others += given.values() if isinstance(given, dict) else given if isinstance(given, list) else []
    texts = [entry.get("content") if isinstance(entry, dict) else entry for entry in others]
    roles = {name: entry.get("content") if isinstance(entry := declared.get(name), dict) else entry for name in _ROLES}
    named = {name: text for name, text in roles.items() if isinstance(text, str)}
    return named, [text for text in texts if isinstance(text, str)]


_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


def convert(folder: Path, name: str) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """The tokenizer in this file of a checkpoint, and its special tokens by name. May import transformers.

    Raises:
        ImportError: A package is missing; the message says how to install it.
        Exception: The file cannot be converted; see `convert_sentencepiece` and `convert_tekken`.
    """
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if name == "tokenizer.model":
        backend, named = convert_sentencepiece(folder / name, config)
        _frame(backend, named, config, None)
        return backend, named
    if name == "tekken.json":
        backend, named = convert_tekken(folder / name)
        _frame(backend, named, config, processors.ByteLevel(trim_offsets=False))
        return backend, named
    if name != "vocab.json":
        need_sentencepiece()  # transformers asks for other packages, too
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    named = {key: value for key in _NAMES if isinstance(value := getattr(loaded, key, None), str)}
    return loaded.backend_tokenizer if loaded.is_fast else convert_python_tokenizer(loaded), named


def _frame(backend: tokenizers.Tokenizer, named: dict[str, str], config: dict[str, Any], inner: Any) -> None:
    """Put tokens around a prompt as the configuration says; without it, the beginning of a sequence before it."""
    begin = named.get("bos_token") if config.get("add_bos_token", True) else None
    end = named.get("eos_token") if config.get("add_eos_token", False) else None
    around = [text for text in (begin, end) if text is not None]
    if around:
        template = " ".join(text for text in (begin, "$A", end) if text is not None)
        tokens = [(text, backend.token_to_id(text)) for text in around]
        framed = processors.TemplateProcessing(single=template, special_tokens=tokens)
        backend.post_processor = processors.Sequence([inner, framed]) if inner else framed


def main() -> None:
    """Arguments: the checkpoint, the name of its tokenizer's file, an empty folder for what is made."""
    folder, name, out = sys.argv[1:]
    try:
        backend, named = convert(Path(folder), name)
    except Exception as error:  # one line for whoever reads it
        raise SystemExit(" ".join(str(error).split())[:500] or type(error).__name__) from None
    (Path(out) / "special_tokens_map.json").write_text(json.dumps(named), encoding="utf-8")
    backend.save(str(Path(out) / "tokenizer.json"))


if __name__ == "__main__":
    main()
