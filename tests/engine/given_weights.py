"""A reader of weights that the test has at hand, and references to them."""

from collections.abc import Iterator
from typing import Any

import torch

from weft.engine.weights.reader import ExpertsRef, TensorRef, WeightRef


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

    def groups(self, ref: WeightRef) -> None:
        return None

    def tensor(self, ref: TensorRef) -> torch.Tensor:
        raise NotImplementedError


def given(weight: torch.Tensor, bias: torch.Tensor | None = None) -> tuple[WeightRef, Given]:
    """What kernels take: `kernels.linear(*given(weight))`."""
    reader = Given(weight, bias)
    return reader.ref, reader


class GivenExperts(Given):
    """Hands out the matrices of experts, (num_experts, out_features, in_features), and their biases."""

    @property
    def experts_ref(self) -> ExpertsRef:
        num_experts, out_features, in_features = self._weight.shape
        return ExpertsRef(WeightRef(("{}",), (out_features,), in_features, self._bias is not None), num_experts)

    def experts(self, ref: ExpertsRef) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        biases = [None] * len(self._weight) if self._bias is None else list(self._bias)
        return zip(self._weight, biases, strict=True)


class OneAfterAnother:
    """A reader of the matrices of experts, in the order in which kernels ask for them."""

    def __init__(self, *given: GivenExperts) -> None:
        self._given = iter(given)

    def experts(self, ref: ExpertsRef) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        return next(self._given).experts(ref)


def given_experts(
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> tuple[ExpertsRef, ExpertsRef, Any]:
    """What kernels take: `kernels.experts(*given_experts(gate_up, down), gating)`."""
    first, second = GivenExperts(gate_up, gate_up_bias), GivenExperts(down, down_bias)
    return first.experts_ref, second.experts_ref, OneAfterAnother(first, second)
