"""What the files of a model say of it: whether all are there, their format, size and quantization, and its context."""

import contextlib
import json
import re
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from weft.engine.gguf.file import GgufError, parts, read_model
from weft.engine.gguf.folder import stem

_PART = re.compile(r"(.*)-\d{5}-of-(\d{5})(\.\w+)$")
_TYPE = re.compile(r"(?:^|[-._/])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|BF16|F16|F32|MXFP4\w*))$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a model without loading it.

    Attributes:
        size_bytes: Of the files of its weights.
        quantization: The type of its weights, such as Q4_K_M, fp8 or bfloat16.
        modified: When its weights were written, in seconds since 1970.
    """

    size_bytes: int
    format: str
    quantization: str
    modified: float


def is_whole(folder: Path) -> bool:
    """Whether a folder holds a checkpoint with a tokenizer and every part of its weights."""
    return folder.is_dir() and not lacks({file.name for file in folder.iterdir() if file.exists()})


def lacks(names: set[str]) -> list[str]:
    """What a folder with files of these names lacks of a checkpoint."""
    from weft.engine.wire.tokenizer_files import TOKENIZER_KINDS  # loads a library

    lacking = [] if "config.json" in names else ["config.json"]
    lacking += [] if any(names.issuperset(kind) for kind in TOKENIZER_KINDS) else ["tokenizer.json"]
    endings = (".safetensors", ".bin")
    weights = next(filter(None, ([name for name in names if name.endswith(ending)] for ending in endings)), None)
    if weights is None:
        return [*lacking, "weights (*.safetensors)"]
    split = [match.groups() for name in weights if (match := _PART.fullmatch(name))]
    wanted = {f"{head}-{i + 1:05}-of-{n}{end}" for head, n, end in split for i in range(int(n))}
    return lacking + sorted(wanted - names)[:1]


def gguf_type(name: str) -> str | None:
    """The type that the name of a GGUF file ends in, such as Q4_K_M; None: it names none."""
    found = _TYPE.search(stem(name))
    return found[1].upper() if found else None


def weights_of(place: Path) -> tuple[Path, ...]:
    """The weights of a checkpoint, of a folder made of a GGUF file, or of such a file; none if parts are missing."""
    if place.is_file():
        with contextlib.suppress(GgufError):
            return parts(place)
        return ()
    quantized = _config(place).get("quantization_config")
    if isinstance(quantized, dict) and quantized.get("quant_method") == "gguf":
        files = quantized.get("files")  # a checkpoint of the hub may name none
        return tuple(Path(file) for file in files if isinstance(file, str)) if isinstance(files, list) else ()
    each_kind = (tuple(place.glob(f"*.{kind}")) for kind in ("safetensors", "bin", "gguf"))
    return next(filter(None, each_kind), ())


def facts_of(place: Path) -> Facts:
    """The facts of what `weights_of` takes."""
    files = weights_of(place)
    stats = [file.stat() for file in files if file.exists()]
    size_bytes, modified = sum(stat.st_size for stat in stats), max((stat.st_mtime for stat in stats), default=0.0)
    if files and files[0].suffix.lower() == ".gguf":
        return Facts(size_bytes, "gguf", gguf_type(files[0].name) or _main_type(files[0], modified), modified)
    config = _config(place)
    quantized = config.get("quantization_config")
    method = quantized.get("quant_method") if isinstance(quantized, dict) else None
    quantization = str(method or config.get("dtype") or config.get("torch_dtype") or "")
    return Facts(size_bytes, "safetensors", quantization, modified)


def _config(folder: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        config = json.loads((folder / "config.json").read_bytes())
        return config if isinstance(config, dict) else {}
    return {}


@lru_cache(maxsize=64)
def _main_type(file: Path, modified: float) -> str:
    """The type of most bytes of a GGUF file; empty if it cannot be read."""
    try:
        num_bytes: Counter[str] = Counter()
        for tensor in read_model(file).tensors.values():
            num_bytes[tensor.kind] += tensor.row_bytes * tensor.shape[0]
        return num_bytes.most_common(1)[0][0]
    except (GgufError, IndexError):
        return ""
