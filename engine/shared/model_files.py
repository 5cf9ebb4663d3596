"""Which files hold a model that has a folder in Hugging Face layout. Imports no torch."""

import json
from pathlib import Path


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
