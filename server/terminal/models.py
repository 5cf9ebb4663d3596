"""`weft models`: what becomes of every causal architecture of transformers, as the tests of this version found it."""

import pathlib
import textwrap

import msgspec

_WIDTH = 100


class _Architectures(msgspec.Struct):
    """A sentence of totals, and model types by what is said of them; made by `docs.generate`."""

    total: str
    groups: dict[str, list[str]]


def describe_models() -> str:
    """The totals, then a paragraph for each outcome and reason, with its model types indented."""
    data = pathlib.Path(__file__).with_name("architectures.json").read_bytes()
    found = msgspec.json.decode(data, type=_Architectures)
    lines = textwrap.wrap(found.total, _WIDTH)
    for title, names in found.groups.items():
        indented = textwrap.wrap(", ".join(names), _WIDTH, initial_indent="  ", subsequent_indent="  ")
        lines += ["", f"{title} ({len(names)})", *indented]
    return "\n".join(lines)
