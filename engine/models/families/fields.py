"""Typed reading of the JSON files of a model folder.

A missing or mistyped value is a `ModelError` that names file and field, so no unchecked value travels further.
A field that is null counts as absent, as published checkpoints have it.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from weft.engine.shared.errors import ModelError

_T = TypeVar("_T")


class Fields:
    """One JSON object and where it came from."""

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self._values = values
        self._where = where

    @classmethod
    def read(cls, path: Path) -> "Fields":
        """Read a file that holds one JSON object. Raises ModelError when it is missing or anything else."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ModelError(f"{path.parent}: no {path.name}") from None
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: not readable as JSON ({error})") from None
        if not isinstance(values, dict):
            raise ModelError(f"{path}: expected a JSON object")
        return cls(values, str(path))

    def names(self) -> tuple[str, ...]:
        """The names of the fields that are not null."""
        return tuple(name for name, value in self._values.items() if value is not None)

    def mentions(self, name: str) -> bool:
        """Whether the field is there, null or not."""
        return name in self._values

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self._values.get(name) is not None

    def optional_integer(self, name: str) -> int | None:
        """An integer, or None when absent."""
        value = self._values.get(name)
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        raise self.wrong(name, "an integer")

    def integer(self, name: str, default: int | None = None) -> int:
        """An integer; without a default it must be there."""
        value = self.optional_integer(name)
        return self._required(name, default) if value is None else value

    def optional_number(self, name: str) -> float | None:
        """A number, or None when absent."""
        value = self._values.get(name)
        if value is None:
            return None
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        raise self.wrong(name, "a number")

    def number(self, name: str, default: float | None = None) -> float:
        """A number; without a default it must be there."""
        value = self.optional_number(name)
        return self._required(name, default) if value is None else value

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._values.get(name)
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        raise self.wrong(name, "true or false")

    def optional_text(self, name: str) -> str | None:
        """A string, or None when absent."""
        value = self._values.get(name)
        if value is None or isinstance(value, str):
            return value
        raise self.wrong(name, "a string")

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings; empty when absent."""
        value = self._values.get(name)
        if value is None:
            return ()
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise self.wrong(name, "a list of strings")

    def integers(self, name: str) -> tuple[int, ...]:
        """One integer or a list of them; empty when absent."""
        value = self._values.get(name)
        if value is None:
            return ()
        items = value if isinstance(value, list) else [value]
        if all(isinstance(item, int) and not isinstance(item, bool) for item in items):
            return tuple(items)
        raise self.wrong(name, "an integer or a list of integers")

    def section(self, name: str) -> "Fields":
        """A nested object; empty when absent."""
        value = self._values.get(name)
        if value is None:
            return Fields({}, f"{self._where}: {name}")
        if isinstance(value, dict):
            return Fields(value, f"{self._where}: {name}")
        raise self.wrong(name, "an object")

    def wrong(self, name: str, expected: str) -> ModelError:
        """The error that says what the field should have been."""
        return ModelError(f"{self._where}: {name} must be {expected}, got {json.dumps(self._values.get(name))}")

    def _required(self, name: str, default: _T | None) -> _T:
        if default is None:
            raise ModelError(f"{self._where}: no {name}")
        return default
