"""Tries a form of groups on the first matrix of a checkpoint that has it, before the kernels get the others.

Some of its outputs are packed and multiplied, and compared with dequantized weights in float32. Inputs are whole
numbers of one byte, which the kernels do not round, so that the precision of scales is all that remains. This takes a
few milliseconds. A form that is wrong here costs memory and speed, not answers: its matrices are kept in bfloat16.
"""

import logging

import torch

from weft.engine.kernels.cpu.grouped import Form, GroupedRows, rows_of
from weft.engine.kernels.cpu.layers import NativeLinear
from weft.engine.kernels.cpu.library import NativeLibrary
from weft.engine.weights.groups import Groups

logger = logging.getLogger(__name__)

_NUM_OUTPUTS = 72
"""Panels of 16, of which the last is not whole."""

_NUM_INPUTS = 4096
"""Used of longer rows: four times what tiles take at once."""

_ROWS = (1, 3, 6, 40)
"""One number for every way in which rows are multiplied."""

_TOLERANCE = 0.02
"""Largest relative error of a row; half precision and bfloat16 cause up to a quarter of it."""


class TriedForms:
    """The forms that were tried with a library, and whether their products are right."""

    def __init__(self, library: NativeLibrary) -> None:
        """Take the functions of a loaded library."""
        self._library = library
        self._are_right: dict[Form, bool] = {}

    def is_wrong(self, form: Form) -> bool:
        """Whether the form was tried and its products are wrong."""
        return not self._are_right.get(form, True)

    def rows_of(self, groups: Groups, wanted: Form | None = None) -> tuple[Form, GroupedRows] | None:
        """As `grouped.rows_of`; None for a form that is wrong, too."""
        found = rows_of(groups, wanted)
        if found and found[0] not in self._are_right:
            self._are_right[found[0]] = self._is_right(found[0], groups)
        return None if found is None or self.is_wrong(found[0]) else found

    def _is_right(self, form: Form, groups: Groups) -> bool:
        error = self._error(form, groups)
        name = f"{form.bits} bits in groups of {form.group}{' with offsets' * form.has_offset}"
        if error <= _TOLERANCE:
            logger.info("matrices of %s: %s, error %.2g", name, self._library.variant, error)
            return True
        logger.warning(
            "matrices of %s are kept in bfloat16: the products of %s differ by %.2g from those of dequantized weights "
            "(bound: %g)",
            *(name, self._library.variant, error, _TOLERANCE),
        )
        return False

    def _error(self, form: Form, groups: Groups) -> float:
        """The largest of any row of products, or of weights; NaN if some are no numbers."""
        outputs = torch.arange(min(_NUM_OUTPUTS, len(groups.values)))
        tile = groups.part(outputs, slice(_NUM_INPUTS)).without_table()
        found = rows_of(tile, form)
        assert found is not None, "the whole matrix has this form"
        linear, exact = NativeLinear(self._library, found[1], None, storage=form), tile.dequantize(torch.float32)
        inputs = _inputs(exact.shape[1])
        products = inputs.float() @ exact.T
        errors = [_row_errors(linear.to_float32(inputs[:rows]), products[:rows]) for rows in _ROWS]
        return float(torch.cat([_row_errors(linear.gather(outputs), exact), *errors]).max())


def _inputs(num_inputs: int) -> torch.Tensor:
    """(rows, num_inputs): the largest of every group is 127, so that its scale is 1."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randint(-127, 128, (max(_ROWS), num_inputs), generator=generator)
    inputs[:, ::16] = 127
    return inputs.bfloat16()


def _row_errors(rows: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    distances: torch.Tensor = torch.linalg.vector_norm(rows - exact, dim=1)
    lengths: torch.Tensor = torch.linalg.vector_norm(exact, dim=1)
    return distances / lengths.clamp_min(1e-6)
