"""Finds the tokenizer.json of a checkpoint; makes one where the checkpoint has a tokenizer of another kind.

It is made once by a child process, because that imports transformers, and kept in the user's cache under a hash of the
files that it was made from.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

TOKENIZER_KINDS = (("tokenizer.json",), ("tekken.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))
"""Names of the files of each kind of tokenizer, the best first."""

_VERSION = b"1"  # of what `convert_tokenizer` makes


_ALSO_READ = ("tokenizer_config.json", "config.json", "added_tokens.json", "special_tokens_map.json")
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
        raise TokenizerFilesError(
            f"{folder} has no tokenizer.json, tekken.json, tokenizer.model, nor vocab.json with merges.txt"
        )
    if kind == TOKENIZER_KINDS[0]:
        return folder
    digest = hashlib.sha256(_VERSION)
    versions = [f"{name} {version(name)}" for name in ("tokenizers", "transformers")]
    for part in (*versions, *kind, *_ALSO_READ):
        content = (folder / part).read_bytes() if (folder / part).is_file() else b""
        digest.update(f"{part} {len(content)} ".encode() + content)
    made = _cache() / digest.hexdigest()
    if not made.is_dir():
        _make(folder, kind[0], made)
    return made


def _cache() -> Path:
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if os.path.isabs(given) else Path.home() / ".cache") / "weft" / "tokenizers"


def _make(folder: Path, name: str, made: Path) -> None:
    """Convert the files of which one has this name; raises TokenizerFilesError."""
    try:
        _convert(folder, name, made)
    except OSError as error:
        fault = f"{error}; XDG_CACHE_HOME may name a folder that can be written"
        raise TokenizerFilesError(f"{folder / name} cannot be converted: {fault}") from None
    except subprocess.TimeoutExpired:
        raise TokenizerFilesError(f"{folder / name} was not converted within {_MOST_SECONDS} s") from None


def _convert(folder: Path, name: str, made: Path) -> None:
    made.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=made.parent) as scratch:
        out = Path(scratch) / "made"
        out.mkdir()
        command = [sys.executable, "-P", "-m", "weft.engine.shared.convert_tokenizer", str(folder), name, str(out)]
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
