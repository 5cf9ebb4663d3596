"""Reads the prompts that a checkpoint puts before texts, from sentence-transformers' configuration."""

import logging
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class VectorPrompts:
    """Prompts by name, and the name of the one that a text gets without one; None: it gets none."""

    texts: Mapping[str, str] = field(default_factory=dict)
    default: str | None = None


NO_PROMPTS = VectorPrompts()


class _File(msgspec.Struct):
    prompts: dict[str, str | None] = {}
    default_prompt_name: str | None = None


def read_vector_prompts(checkpoint: pathlib.Path) -> VectorPrompts:
    """Read config_sentence_transformers.json in the checkpoint folder; no prompts if it is missing or broken."""
    path = checkpoint / "config_sentence_transformers.json"
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_File)
    except FileNotFoundError:
        return NO_PROMPTS
    except (OSError, msgspec.DecodeError) as exc:
        _log.warning("%s is not used: %s", path, exc)
        return NO_PROMPTS
    texts = {name: text or "" for name, text in file.prompts.items()}
    return VectorPrompts(texts, file.default_prompt_name if file.default_prompt_name in texts else None)
