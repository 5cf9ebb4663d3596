"""A reader of weights that the test has at hand, and references to them."""

import torch

from weft.engine.weights.refs import TensorRef, WeightRef


class Given:
    """Hands out one matrix, whatever is asked for."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight, self._bias = weight, bias

    @property
    def ref(self) -> WeightRef:
        out_features, in_features = self._weight.shape
        return WeightRef(("given",), (out_features,), in_features, self._bias is not None)

    def dense(self, ref: WeightRef) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._weight, self._bias

    def tensor(self, ref: TensorRef) -> torch.Tensor:
        raise NotImplementedError


def given(weight: torch.Tensor, bias: torch.Tensor | None = None) -> tuple[WeightRef, Given]:
    """What kits take: `kit.linear(*given(weight))`."""
    reader = Given(weight, bias)
    return reader.ref, reader
