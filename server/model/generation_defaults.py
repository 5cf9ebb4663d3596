"""What the checkpoint asks for when a request does not say: the sampling part of its generation_config.json.

End-of-sequence ids from the same file are the engine's business. A file that is missing or broken means no defaults:
many checkpoints have none, and serving goes on without it.
"""

import logging
import pathlib
from dataclasses import dataclass, fields

import msgspec

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Sampling defaults of the model; None where the checkpoint says nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def read_generation_defaults(checkpoint: pathlib.Path) -> GenerationDefaults:
    """Read generation_config.json in the checkpoint folder; values of another type are left out, with a warning."""
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
