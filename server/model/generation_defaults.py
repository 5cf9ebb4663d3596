"""Reads the model's default sampling parameters from generation_config.json.

They apply to what a request leaves out. The engine reads the end-of-sequence ids from the same file. If the file is
missing or broken, there are no defaults and serving goes on; many checkpoints have no such file.
"""

import logging
import pathlib
from dataclasses import dataclass, fields

import msgspec

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Sampling defaults of the model. None: the checkpoint has no value."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def read_generation_defaults(checkpoint: pathlib.Path) -> GenerationDefaults:
    """Read generation_config.json in the checkpoint folder. Values of a wrong type are skipped with a warning."""
    path = checkpoint / "generation_config.json"
    try:
        config = msgspec.json.decode(path.read_bytes(), type=dict[str, object])
    except FileNotFoundError:
        return GenerationDefaults()
    except (OSError, msgspec.DecodeError) as exc:
        _log.warning("%s is not used: %s", path, exc)
        return GenerationDefaults()
    found: dict[str, float | int] = {}
    for field in fields(GenerationDefaults):
        value = config.get(field.name)
        if value is None:
            continue
        is_number = isinstance(value, int if field.name == "top_k" else int | float) and not isinstance(value, bool)
        if is_number:
            found[field.name] = value  # type: ignore[assignment]  # the line above is the check
        else:
            _log.warning("%s: %s is not used: expected a number, got %r", path, field.name, value)
    return GenerationDefaults(**found)  # type: ignore[arg-type]  # top_k was checked to be an int
