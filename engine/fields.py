"""Typed reading of the JSON files of a model folder, and the range of every number in them, by the name of its field.

A value that is missing, mistyped or out of its range is a `ModelError` that names file and field, so callers never see
an unchecked value. A null field counts as absent, because published checkpoints use it so.

A file may come from anybody. Counts decide how much is made before the weights are looked at, divisors must not be 0,
and what has no end would never be computed. The ranges are far beyond what any published model has.
"""

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from math import inf
from pathlib import Path
from typing import TypeVar, cast

from weft.engine.wire.errors import ModelError

MAX_NUM_LAYERS = 512
MAX_NUM_EXPERTS = 16_384
MAX_NUM_EXPERTS_IN_ALL = 65_536
"""Experts of all layers: each may have tensors of its own."""
MAX_SIZE = 1 << 24
"""Of a dimension of a tensor, and of the vocabulary."""
MAX_CONTEXT = 1 << 30
"""Tokens of the longest context, after it was extended."""

_ANY_INTEGER = 1 << 31
_ANY_NUMBER = 1e12

_RANGES: tuple[tuple[str, float, float], ...] = (
    (r"(num_)?(hidden|encoder|decoder)_layers|(n|num)_layers?|num_blocks", 1, MAX_NUM_LAYERS),
    (r"num_(nextn_predict|kv_shared|dense)_layers|max_window_layers|first_k_dense_replace", 0, _ANY_INTEGER),
    (r"(q_)?group_size", -1, MAX_SIZE),
    (r"hidden_size|vocab_size|block_multiple_of", 1, MAX_SIZE),
    (r".*experts(_per_tok(en)?)?|.*topk|moe_k", 0, MAX_NUM_EXPERTS),
    (r".*heads|n_head", 1, 1 << 16),
    ("sliding_window_pattern", 0, _ANY_INTEGER),
    (r".*_(interval|period)|(decoder|interleave|moe)_.*step|.*every_n_layers", 1, _ANY_INTEGER),
    (r"n_groups?|num_groups|mamba_n_groups", 1, 1 << 16),
    (r".*intermediate_size|.*_per_layer_input|q_lora_rank|(qk_)?rot?(pe|ary)_(head_)?dim|.*window_size", 0, MAX_SIZE),
    (
        r".*(_size|_dim|_rank|_width|_kernel|_d_conv|_expand|L_cache)|n_embd?|n_inner|d_model|.*d_state|expand|dim",
        1,
        MAX_SIZE,
    ),
    (r".*max_position_embeddings|n_positions|n_ctx|max_seq_len|seq_length|max_sequence_length", 1, MAX_CONTEXT),
    (r".*(theta|base_freq)|rotary_emb_base", 2.0, 1e15),
    (r"((short|long)_)?factor|alpha", 1e-3, 1e6),
    (r"(.*_)?(eps|epsilon)", 0.0, 1.0),
    (
        r".*soft_?cap(ping)?|logits_scaling|query_pre_attn_scalar|(low|high)_freq_factor|beta_(fast|slow)",
        1e-6,
        _ANY_NUMBER,
    ),
    (r"partial_rotary_factor|rotary_pct", 0.0, 1.0),
    ("time_step_limit", 0.0, inf),
    ("offset", 0, 1 << 60),
)
"""The first pattern that a whole name has counts; other fields may have any number that is not beyond all use."""


@cache
def own_range(name: str) -> tuple[float, float] | None:
    """The least and the largest value of a field; None: it is like any other."""
    return next(((low, high) for pattern, low, high in _RANGES if re.fullmatch(pattern, name)), None)


def range_of(name: str, is_integer: bool) -> tuple[float, float]:
    """The least and the largest value of any field."""
    any_number = _ANY_INTEGER if is_integer else _ANY_NUMBER
    return own_range(name) or (-any_number, any_number)


_T = TypeVar("_T")
_Number = TypeVar("_Number", int, float)

MAX_FILE_BYTES = 64 << 20
"""Of a JSON file. The largest known, an index of tensors, has 10 MB."""
_MAX_SHOWN = 80
"""Characters of a value that an error quotes."""


@contextlib.contextmanager
def understood(path: Path) -> Iterator[None]:
    """Make a `ModelError` of what follows from values that are in their ranges, and do not go together.

    A family divides, multiplies and counts with what a file says; what comes out is no fault of Weft's.
    """
    try:
        yield
    except (ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as error:
        fault = " ".join(str(error).split())[:_MAX_SHOWN]
        raise ModelError(f"{path}: its values do not go together ({type(error).__name__}: {fault})") from error


class Fields:
    """One JSON object and where it came from."""

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self._values = values
        self._where = where

    @classmethod
    def read(cls, path: Path) -> "Fields":
        """Read a file that holds one JSON object. Raises ModelError if it is missing or holds anything else."""
        values = _read_json(path)
        if not isinstance(values, dict):
            raise ModelError(f"{path}: expected a JSON object")
        return cls(values, str(path))

    @classmethod
    def read_list(cls, path: Path) -> "list[Fields]":
        """Read a file that holds a list of JSON objects; raises ModelError as `read` does."""
        items = _read_json(path)
        if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
            raise ModelError(f"{path}: expected a list of JSON objects")
        return [cls(item, str(path)) for item in items]

    def names(self) -> tuple[str, ...]:
        """The names of the fields that are not null."""
        return tuple(name for name, value in self._values.items() if value is not None)

    def mentions(self, name: str) -> bool:
        """Whether the field is present, null included."""
        return name in self._values

    def has(self, name: str) -> bool:
        """Whether the field is present and not null."""
        return self._values.get(name) is not None

    def raw(self, name: str) -> object:
        """The value, whatever it is; None if absent."""
        return self._values.get(name)

    def optional_integer(self, name: str) -> int | None:
        """An integer, or None if absent."""
        value = self._typed(name, int, "an integer")
        return None if value is None else self._within(name, value)

    def integer(self, name: str, default: int | None = None) -> int:
        """An integer; required if there is no default."""
        value = self.optional_integer(name)
        return self._required(name, default) if value is None else value

    def size(self, name: str, default: int | None = None) -> int:
        """A positive integer; required if there is no default."""
        value = self.integer(name, default)
        if value < 1:
            raise self.wrong(name, "a positive integer")
        return value

    def check_all(self) -> None:
        """Refuse numbers at any depth that are above their ranges; for who gives the file to others to read."""
        parts: list[tuple[str, object]] = [("", self._values)]
        while parts:
            name, value = parts.pop()
            if isinstance(value, dict):
                parts += value.items()
            elif isinstance(value, list):
                parts += [(name, item) for item in value]
            elif _is_a(value, (int, float)):
                _, high = range_of(name, isinstance(value, int))
                if not cast(float, value) <= high:
                    raise Fields({name: value}, self._where).wrong(name, f"at most {high:.15g}")

    def check_own(self, sections: Iterable[str] = ()) -> None:
        """Refuse numbers outside of the ranges that their fields have, whoever reads them later.

        Args:
            sections: Objects whose numbers, at any depth, are looked at, too. Others are read by nobody.
        """
        for name, value in self._values.items():
            if _is_a(value, (int, float)) and own_range(name) is not None:
                self._within(name, cast(float, value), is_integer=isinstance(value, int))
            elif isinstance(value, dict) and name in sections:
                self.section(name).check_own(value)

    def integer_or_auto(self, name: str, default: int) -> int:
        """An integer; the default if absent or "auto"."""
        return default if self._values.get(name) == "auto" else self.integer(name, default)

    def optional_number(self, name: str) -> float | None:
        """A number, or None if absent."""
        value = self._typed(name, (int, float), "a number")
        return None if value is None else float(self._within(name, value, is_integer=False))

    def number(self, name: str, default: float | None = None) -> float:
        """A number; required if there is no default."""
        value = self.optional_number(name)
        return self._required(name, default) if value is None else value

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._typed(name, bool, "true or false")
        return default if value is None else value

    def optional_text(self, name: str) -> str | None:
        """A string, or None if absent."""
        return self._typed(name, str, "a string")

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings; empty if absent."""
        value = self._values.get(name)
        if value is None:
            return ()
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise self.wrong(name, "a list of strings")

    def integers(self, name: str) -> tuple[int, ...]:
        """One integer or a list of them; empty if absent."""
        value = self._values.get(name)
        items = value if isinstance(value, list) else [] if value is None else [value]
        if all(_is_a(item, int) for item in items):
            return tuple(self._within(name, cast(int, item)) for item in items)
        raise self.wrong(name, "an integer or a list of integers")

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of numbers; empty if absent. transformers 5 writes infinity as an object."""
        items = [inf if item == {"__float__": "Infinity"} else item for item in self._typed(name, list, "a list") or []]
        if all(_is_a(item, (int, float)) for item in items):
            return tuple(float(self._within(name, item, is_integer=False)) for item in items)
        raise self.wrong(name, "a list of numbers")

    def with_defaults(self, defaults: Mapping[str, object]) -> "Fields":
        """The same with values for fields that are absent or null."""
        given = {name: value for name, value in self._values.items() if value is not None}
        return Fields({**self._values, **defaults, **given}, self._where)

    def with_values(self, values: Mapping[str, object]) -> "Fields":
        """The same with other values for these fields."""
        return Fields({**self._values, **values}, self._where)

    def with_aliases(self, aliases: Mapping[str, str]) -> "Fields":
        """The same with further names (values of aliases) for fields that have them and are not there."""
        more = {name: self._values[alias] for alias, name in aliases.items() if self.has(alias) and not self.has(name)}
        return self.with_defaults(more) if more else self

    def inheriting(self, outer: "Fields", names: Iterable[str]) -> "Fields":
        """The same with those of the named fields of another object that are not here."""
        return self.with_defaults({name: outer._values[name] for name in names if outer.has(name)})

    def section(self, name: str) -> "Fields":
        """A nested object; empty if absent."""
        return Fields(self._typed(name, dict, "an object") or {}, f"{self._where}: {name}")

    def wrong(self, name: str, expected: str) -> ModelError:
        """The error that says what the field should have been."""
        text = json.dumps(self._values.get(name))
        shown = text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
        return ModelError(f"{self._where}: {name} must be {expected}, got {shown}")

    def _typed(self, name: str, kind: type[_T] | tuple[type[_T], ...], expected: str) -> _T | None:
        value = self._values.get(name)
        if value is None or _is_a(value, kind):
            return cast(_T | None, value)
        raise self.wrong(name, expected)

    def _within(self, name: str, value: _Number, *, is_integer: bool = True) -> _Number:
        low, high = range_of(name, is_integer)
        if low <= value <= high:
            return value
        raise self.wrong(name, f"between {low:.15g} and {high:.15g}")

    def _required(self, name: str, default: _T | None) -> _T:
        if default is None:
            raise ModelError(f"{self._where}: no {name}")
        return default


def _is_a(value: object, kind: type | tuple[type, ...]) -> bool:
    """Like isinstance, except that a bool is no int."""
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _read_json(path: Path) -> object:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ModelError(f"{path}: must have at most {MAX_FILE_BYTES} bytes, has {path.stat().st_size}")
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path.parent}: no {path.name}") from None
    except RecursionError:
        raise ModelError(f"{path}: not readable as JSON (nested too deeply)") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: not readable as JSON ({error})") from None
