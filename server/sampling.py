"""Sampling defaults: what holds for fields that a request leaves out, and who says so.

A checkpoint states some, and the operator's `default_sampling` goes before it. For what neither states, an API has its
own. What was made of a GGUF file names llama.cpp's as assumed, so that other APIs can tell them from stated ones.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated

from pydantic import BeforeValidator

from weft.engine.wire.params import SamplingParams

Number = int | float


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Sampling defaults of a model. None: nobody states a value.

    Attributes:
        assumed: The fields that neither the checkpoint nor the operator states.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    assumed: frozenset[str] = frozenset()

    def values(self) -> dict[str, Number]:
        """All of them that have a value."""
        return {name: value for name in NAMES if (value := getattr(self, name)) is not None}

    def over(self, usual: Mapping[str, Number]) -> dict[str, Number]:
        """What is stated, and an API's usual values for the rest."""
        return {**usual, **{name: value for name, value in self.values().items() if name not in self.assumed}}

    def with_stated(self, stated: Mapping[str, Number]) -> "GenerationDefaults":
        """These defaults, with values that the operator states in place of others."""
        return replace(self, **stated, assumed=self.assumed - stated.keys())  # type: ignore[arg-type]  # were checked

    def __str__(self) -> str:
        """As the log shows it."""
        stated, assumed = self.over({}), self.values()
        parts = [", ".join(f"{name} {value:g}" for name, value in stated.items())]
        parts += [", ".join(f"{name} {value:g}" for name, value in assumed.items() if name not in stated)]
        return "; as in llama.cpp with ".join(filter(None, parts))


NAMES = tuple(entry.name for entry in fields(GenerationDefaults) if entry.name != "assumed")


def sampling_fault(name: str, value: object) -> str | None:
    """Why a request could not have this value; None if it could."""
    if not isinstance(value, int if name == "top_k" else Number) or isinstance(value, bool):
        return f"expected a number, got {value!r:.80}"
    if name == "top_k" and value == -1:  # all, as other servers have it
        return None
    try:
        SamplingParams(**{name: value})  # type: ignore[arg-type]  # checks its range
    except ValueError as exc:
        return str(exc)
    return None


def _read(value: object) -> object:
    """Text such as a=1,b=2 (flags, environment, YAML), JSON, or a mapping -> checked numbers by name."""
    if isinstance(value, list):
        value = ",".join(map(str, value))
    if isinstance(value, str):
        pairs = [pair.partition("=") for pair in value.split(",")]
        is_json = value.lstrip().startswith("{")
        value = json.loads(value) if is_json else {name.strip(): _number(text) for name, _, text in pairs}
    if not isinstance(value, dict):
        raise ValueError("input should be of the form temperature=0.7,top_p=0.9, or a mapping")
    for name, given in value.items():
        if name not in NAMES:
            raise ValueError(f"{name!r} has no default here; there is {', '.join(NAMES)}")
        if fault := sampling_fault(name, given):
            raise ValueError(f"{name}: {fault}")
    return value


def _number(text: str) -> object:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


SamplingDefaults = Annotated[dict[str, Number], BeforeValidator(_read)]
