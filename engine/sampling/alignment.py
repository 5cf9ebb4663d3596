"""When tokens are spoken: a path through the attention from the tokens of a text to the positions of a sound.

As OpenAI's `whisper/timing.py` does it: of some heads, which the checkpoint names, the attention of each token is
compared with that of the others, smoothed over positions and averaged. Dynamic time warping then finds the cheapest
path from the first token and position to the last ones.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional
from typing_extensions import override

from weft.engine.batch import Floats
from weft.engine.sampling.pooling import Pooler
from weft.engine.wire.params import Pooling


@dataclass(frozen=True, slots=True)
class Alignment:
    """What follows the sound in a model that hears.

    Attributes:
        num_heads: How many do.
        num_positions: Of every sound.
        median_width: Positions of the median that smooths, an odd number.
        hidden_size: Values of a hidden state, behind which the scores of the heads stand.
    """

    num_heads: int
    num_positions: int
    median_width: int
    hidden_size: int

    def pooler(self, pooling: Pooling, num_input_slots: int, num_tokens: int) -> Pooler:
        """See `PooledModel`."""
        return _Aligner(self, pooling, num_input_slots, num_tokens)

    def fault(self, pooling: Pooling, num_tokens: int) -> str | None:
        """See `PooledModel`."""
        if pooling.aligned is None:
            return "this engine makes no vectors: its task is generate"
        if pooling != Pooling(aligned=pooling.aligned):
            return f"aligned is only allowed alone, got {pooling}"
        num_begun, num_positions = pooling.aligned
        if not 1 <= num_begun < num_tokens:
            return f"aligned: tokens before the text must be between 1 and {num_tokens - 1}, got {num_begun}"
        if not 1 <= num_positions <= self.num_positions:
            return f"aligned: positions must be between 1 and {self.num_positions}, got {num_positions}"
        return None


class _Aligner(Pooler):
    """The scores of one request. All of its tokens are computed in the step that reads the sound."""

    def __init__(self, model: Alignment, pooling: Pooling, num_input_slots: int, num_tokens: int) -> None:
        super().__init__(range(num_input_slots, num_tokens))
        self._alignment, self._aligned = model, pooling.aligned or (1, 1)

    @override
    def vector(self) -> Floats:
        """(num_tokens - num_begun, 1) the positions at which the tokens behind the first ones begin."""
        model, (num_begun, num_positions) = self._alignment, self._aligned
        rows = torch.from_numpy(np.stack(self._rows)[:, model.hidden_size :])
        scores = rows.view(len(rows), model.num_heads, model.num_positions).transpose(0, 1)
        return align(scores[..., :num_positions], num_begun, model.median_width)[:, None]


def align(scores: torch.Tensor, num_begun: int, median_width: int) -> Floats:
    """The positions at which tokens begin; a token is heard by the one before it.

    Args:
        scores: (num_heads, num_tokens, num_positions) float32 products of queries and keys.
        num_begun: Tokens before the text.

    Returns:
        (num_tokens - num_begun,) float32, never falling.
    """
    total = torch.zeros(scores.shape[1:])
    for own in scores:  # what all heads take at once is a hundred times a model's step
        weights = own.softmax(-1)
        std, mean = torch.std_mean(weights, dim=0, keepdim=True, unbiased=False)
        total += _medians((weights - mean) / std.clamp(min=torch.finfo(torch.float32).tiny), median_width)
    return _warp(-total[num_begun - 1 : -1].div(len(scores)).double().numpy())


def _medians(rows: torch.Tensor, width: int) -> torch.Tensor:
    """(num_rows, n) the medians of the values around each one; the ends are reflected."""
    half, size = width // 2, rows.size(1)
    if size <= half:
        return rows
    padded = functional.pad(rows, (half, half), mode="reflect")
    values = [padded[:, at : at + size] for at in range(width)]
    for last in range(width - 1, half - 1, -1):  # the largest comes to its place, whole rows at once
        for at in range(last):
            values[at : at + 2] = torch.minimum(*values[at : at + 2]), torch.maximum(*values[at : at + 2])
    return values[half]


def _warp(cost: Floats) -> Floats:
    """(num_rows, num_columns) costs -> (num_rows,) the column at which the cheapest path comes to each row.

    The path goes by one row, one column or both (Sakoe and Chiba, 1978). The cells of a diagonal depend on the two
    before it alone, so each is computed at once.
    """
    num_rows, num_columns = cost.shape
    total = np.full((num_rows + 1, num_columns + 1), np.inf, np.float32)
    total[0, 0] = 0
    came = np.zeros((num_rows + 1, num_columns + 1), np.int8)  # from: 0 both before, 1 the row, 2 the column
    for diagonal in range(2, num_rows + num_columns + 1):
        rows = np.arange(max(1, diagonal - num_columns), min(num_rows, diagonal - 1) + 1)
        columns = diagonal - rows
        both, row, column = total[rows - 1, columns - 1], total[rows - 1, columns], total[rows, columns - 1]
        best = np.where((both < row) & (both < column), 0, np.where((row < both) & (row < column), 1, 2))
        came[rows, columns] = best
        total[rows, columns] = cost[rows - 1, columns - 1] + np.choose(best, (both, row, column))
    came[0, :], came[:, 0] = 2, 1
    first = np.zeros(num_rows, np.float32)
    row, column = num_rows, num_columns
    while row > 0:
        first[row - 1] = max(column - 1, 0)
        step = came[row, column]
        row, column = row - int(step != 2), column - int(step != 1)
    return first
