"""From references to tensors on the device: the seam behind which checkpoint formats differ."""

from collections.abc import Callable
from typing import Protocol

import torch

from weft.engine.weights.refs import VectorRef, WeightRef

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in total, as they are on the device."""


class WeightReader(Protocol):
    """Reads what a model refers to. A format that keeps weights packed adds a method that hands them out packed."""

    def dense(self, ref: WeightRef) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight (out_features, in_features) and bias (out_features,), which then belong to the caller.

        Raises:
            ModelError: The checkpoint does not have it in this shape.
        """

    def vector(self, ref: VectorRef) -> torch.Tensor:
        """(size,), with the offset added; raises as `dense` does."""


class TensorSource(Protocol):
    """Where plain tensors come from."""

    def fill(self, name: str, target: torch.Tensor) -> None:
        """Copy the tensor into target; raises ModelError when it does not exist or has another shape."""

    def close(self) -> None:
        """End of loading; raises ModelError when tensors are left that nobody asked for."""


class DenseReader:
    """Reads checkpoints of plain tensors, each straight to its place: stacked matrices projection by projection."""

    def __init__(
        self,
        source: TensorSource,
        device: torch.device,
        dtype: torch.dtype,
        total_bytes: int,
        progress: Progress = lambda done, total: None,
    ) -> None:
        """Read into tensors of dtype on the device; progress is told after every tensor."""
        self._source = source
        self._device = device
        self._dtype = dtype
        self._progress = progress
        self._done_bytes, self._total_bytes = 0, total_bytes

    def dense(self, ref: WeightRef) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `WeightReader`."""
        weight = self._empty(ref.out_features, ref.in_features)
        bias = self._empty(ref.out_features) if ref.has_bias else None
        start = 0
        for name, size in zip(ref.names, ref.sizes, strict=True):
            self._fill(f"{name}.weight", weight[start : start + size])
            if bias is not None:
                self._fill(f"{name}.bias", bias[start : start + size])
            start += size
        return weight, bias

    def vector(self, ref: VectorRef) -> torch.Tensor:
        """See `WeightReader`."""
        values = self._empty(ref.size)
        self._fill(f"{ref.name}.weight", values)
        return values.float() + ref.offset if ref.offset else values

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def _fill(self, name: str, target: torch.Tensor) -> None:
        self._source.fill(name, target)
        self._done_bytes += target.nbytes
        self._progress(self._done_bytes, self._total_bytes)
