"""One of several models in the settings: its checkpoint, its names, when it is loaded, and what it sets for itself.

Knows how an entry is written, not which settings there are: `Settings` checks those that an entry sets.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

MAX_MODELS = 64
"""Most models, and most aliases of all of them together."""

ModelName = Annotated[str, Field(pattern=r"^[^\s,\x00-\x1f\x7f-\x9f]+$", max_length=200)]


class ModelEntry(BaseModel):
    """A model. Its further fields are settings, which take the place of those of the whole server."""

    model_config = ConfigDict(frozen=True, extra="allow")

    model: str | None = None
    """Checkpoint, as MODEL."""
    aliases: tuple[ModelName, ...] = ()
    """Further names in the API, which may be given to another model while the server runs."""
    load: Literal["always", "on-demand"] = "always"
    """Whether it is loaded at the start and stays, or at its first request and leaves when others need its room."""
    unload_after: float | None = Field(default=None, gt=0)
    """Seconds without a request after which one that is loaded on demand leaves. Default: never."""

    @property
    def own(self) -> Mapping[str, object]:
        """The settings that it sets for itself, as they were written."""
        return self.model_extra or {}

    def __str__(self) -> str:
        """As `weft config` shows it."""
        facts = self.model_dump(exclude={"model"}, exclude_unset=True)
        shown = ", ".join(f"{name}: {value}" for name, value in facts.items())
        return f"{self.model or 'demo model'}{f' ({shown})' * bool(facts)}"


def _read_entries(value: object) -> object:
    """Text in JSON (environment) -> mapping; a model may be its checkpoint alone. Keys may have dashes."""
    entries = json.loads(value) if isinstance(value, str) else value
    if not isinstance(entries, dict):
        raise ValueError("input should be a mapping of names to models, in JSON or YAML")
    for name, entry in entries.items():
        if isinstance(entry, str):
            entries = entries | {name: {"model": entry}}
        elif isinstance(entry, dict):
            entries = entries | {name: {str(key).replace("-", "_"): each for key, each in entry.items()}}
    return entries


ModelEntries = Annotated[dict[ModelName, ModelEntry], BeforeValidator(_read_entries), Field(max_length=MAX_MODELS)]


def check_names(entries: Mapping[str, ModelEntry]) -> None:
    """Raise ValueError if two models share a name, or there are too many."""
    given = [*entries, *(alias for entry in entries.values() for alias in entry.aliases)]
    if len(given) - len(entries) > MAX_MODELS:
        raise ValueError(f"input should have at most {MAX_MODELS} aliases, got {len(given) - len(entries)}")
    if twice := next((name for name in given if given.count(name) > 1), None):
        raise ValueError(f"input should have each name once, got {twice} twice")
    for name, entry in entries.items():
        if entry.unload_after is not None and entry.load == "always":
            raise ValueError(f"{name}: unload_after needs load: on-demand")
