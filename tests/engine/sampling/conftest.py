import dataclasses
from typing import Any, Protocol

import numpy as np
import pytest

from weft.engine.batch import SamplingBatch


class MakeBatch(Protocol):
    def __call__(self, num_rows: int, **fields: Any) -> SamplingBatch: ...


@pytest.fixture
def make_batch() -> MakeBatch:
    """Builds a `SamplingBatch` of plain greedy rows; a field may be given as a scalar or one value per row."""

    def make(num_rows: int, **fields: Any) -> SamplingBatch:
        ints, floats = np.zeros(0, np.int64), np.zeros(0, np.float32)
        defaults = {"temperatures": 0.0, "top_ps": 1.0, "min_ps": 0.0, "uniforms": 0.0, "top_ks": 0, "num_logprobs": -1}
        columns: dict[str, Any] = {
            name: np.array(
                np.broadcast_to(fields.pop(name, value), (num_rows,)),
                np.int64 if isinstance(value, int) else np.float32,
            )
            for name, value in defaults.items()
        }
        empty = SamplingBatch(
            **columns,
            bias_rows=ints,
            bias_ids=ints,
            bias_values=floats,
            allowed_rows=ints,
            allowed_entries=ints,
            allowed_ids=ints,
        )
        sparse: dict[str, Any] = {
            name: np.array(value, np.float32 if name == "bias_values" else np.int64)
            if isinstance(value, list)
            else value
            for name, value in fields.items()
        }
        return dataclasses.replace(empty, **sparse)

    return make
