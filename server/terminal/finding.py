"""`Finding`: the result of one check of `weft doctor`."""

from dataclasses import dataclass
from typing import Literal

Severity = Literal["ok", "note", "missing"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The name of a check, what it found, and what to do about it, if anything.

    "missing": Weft cannot serve with these settings. "note": it can, but something is worth knowing.
    """

    name: str
    status: Severity
    detail: str
    advice: str = ""


def gigabytes(num_bytes: int) -> str:
    """Format a number of bytes, such as 1.2 GB."""
    return f"{num_bytes / 1e9:,.1f} GB"
