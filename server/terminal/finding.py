"""What `weft doctor` finds out about one thing."""

from dataclasses import dataclass
from typing import Literal

Severity = Literal["ok", "note", "missing"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check: what was looked at, what is there, and what to do about it, if anything.

    "missing": Weft cannot serve as asked; "note": it can, and something is worth knowing.
    """

    name: str
    status: Severity
    detail: str
    advice: str = ""


def gigabytes(num_bytes: int) -> str:
    """Such as 1.2 GB."""
    return f"{num_bytes / 1e9:,.1f} GB"
