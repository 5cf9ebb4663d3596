"""Writes vectors as the JSON of each endpoint. Long answers are written in a thread."""

import base64
from array import array
from operator import mul

import msgspec

from weft.engine.shared.vectors import PooledOutput
from weft.server.schemas.vectors import Embedding, Hidden


def values_of(output: PooledOutput) -> list[float]:
    """The values, row after row."""
    return array("f", output.values).tolist()


def encoded(output: PooledOutput, encoding: str | None) -> list[float] | str:
    """The values in the form that the body asks for."""
    return base64.b64encode(output.values).decode() if encoding == "base64" else values_of(output)


def embedding(index: int, output: PooledOutput, encoding: str | None) -> Embedding:
    """An entry of POST /v1/embeddings."""
    return Embedding(index, encoded(output, encoding))


def hidden(index: int, output: PooledOutput, encoding: str | None, *, is_per_token: bool) -> Hidden:
    """An entry of POST /pooling."""
    if encoding == "base64" or not is_per_token:
        return Hidden(index, encoded(output, encoding))
    values = array("f", output.values)
    width = len(values) // output.num_rows
    # Row by row: no other thread runs while one call encodes, and lists take ten times as much memory as the values.
    rows = [msgspec.json.encode(values[start : start + width].tolist()) for start in range(0, len(values), width)]
    return Hidden(index, msgspec.Raw(b"[%s]" % b",".join(rows)))


def cosine(first: PooledOutput, second: PooledOutput) -> float:
    """The cosine of the angle between two vectors; 0 if one has no direction."""
    a, b = values_of(first), values_of(second)
    norms = sum(map(mul, a, a)) * sum(map(mul, b, b))
    return sum(map(mul, a, b)) / norms**0.5 if norms else 0.0
