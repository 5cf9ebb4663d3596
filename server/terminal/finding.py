"""What `weft doctor` finds out about one thing."""

from dataclasses import dataclass
from typing import Literal

Severity = Literal["ok", "note", "missing"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check.

    Attributes:
        name: What was looked at.
        status: "missing": Weft cannot serve as asked; "note": it can, and something is worth knowing.
        detail: What is there.
        advice: What to do about it; empty where there is nothing to do.
    """

    name: str
    status: Severity
    detail: str
    advice: str = ""


def gigabytes(num_bytes: int) -> str:
    """Such as 1.2 GB."""
    return f"{num_bytes / 1e9:,.1f} GB"
