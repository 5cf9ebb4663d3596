"""Rules about types that CUDA's operators have and torch's fake ones do not check."""

from collections.abc import Sequence
from typing import Any

import torch

_aten = torch.ops.aten
_PRODUCTS = {_aten.mm, _aten.addmm, _aten.addmm_, _aten.bmm, _aten.baddbmm, _aten.baddbmm_}
_LONG = (torch.int64,)
_INDICES = {
    _aten.embedding: (1, (torch.int64, torch.int32)),
    _aten.index_select: (2, (torch.int64, torch.int32)),
    _aten.index_copy: (2, _LONG),
    _aten.index_copy_: (2, _LONG),
    _aten.gather: (2, _LONG),
    _aten.scatter: (2, _LONG),
    _aten.scatter_: (2, _LONG),
}
"""Operator -> which argument the indices are, and their types."""

_HALVES = (torch.bfloat16, torch.float16)


def check_types(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Refuse types that an operator on CUDA refuses.

    Raises:
        RuntimeError: It does.
    """
    operator = func.overloadpacket
    if operator in _PRODUCTS:
        dtypes = {value.dtype for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)}
        widened = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype)), None)
        can_widen = widened is None or (widened == torch.float32 and dtypes <= set(_HALVES))
        if len(dtypes) > 1 or not can_widen:
            raise RuntimeError(f"{func} of {dtypes} to {widened}")
    if operator in _INDICES:
        place, allowed = _INDICES[operator]
        if args[place].dtype not in allowed:
            raise RuntimeError(f"{func} with indices of {args[place].dtype}")
