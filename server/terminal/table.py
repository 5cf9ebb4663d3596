"""Rows as aligned plain text."""

from collections.abc import Sequence


def align(rows: Sequence[Sequence[str]]) -> str:
    """One line per row; every column but the last is as wide as its widest cell. All rows have as many cells."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)
