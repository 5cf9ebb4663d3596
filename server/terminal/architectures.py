"""`weft models --architectures`: what becomes of each causal architecture of transformers, as tests found it."""

import pathlib
import textwrap

import msgspec

_WIDTH = 100


class _Architectures(msgspec.Struct):
    """A sentence of totals, and model types by what is said of them; made by `docs.generate`."""

    total: str
    groups: dict[str, list[str]]


def describe_architectures() -> str:
    """The totals, then a paragraph for each outcome and reason, with its model types indented."""
    data = pathlib.Path(__file__).with_suffix(".json").read_bytes()
    found = msgspec.json.decode(data, type=_Architectures)
    lines = textwrap.wrap(found.total, _WIDTH)
    for title, names in found.groups.items():
        indented = textwrap.wrap(", ".join(names), _WIDTH, initial_indent="  ", subsequent_indent="  ")
        lines += ["", f"{title} ({len(names)})", *indented]
    return "\n".join(lines)
