"""Puts a kit's matrices in the place of a module's linear layers, so that they are as fast as those of native families.

The plain weights are freed one after another. Nothing is replaced in a module whose layers have other matrices too,
such as fused experts: those need torch's threads, which would take the cores from the kit's.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from weft.engine.layers.kit import LayerKit
from weft.engine.layers.parts import Layer, Linear
from weft.engine.weights.formats import WeightReader
from weft.engine.weights.refs import ExpertsRef, TensorRef, WeightRef


@dataclass(frozen=True, slots=True)
class _Given(WeightReader):
    """Hands out one matrix."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def dense(self, ref: WeightRef) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.weight, self.bias

    def experts(self, ref: ExpertsRef) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        raise NotImplementedError(ref.matrix.names)

    def tensor(self, ref: TensorRef) -> torch.Tensor:
        raise NotImplementedError(ref.name)


class _Rows(torch.nn.Module):
    """A kit's layer over the last dimension of any tensor."""

    def __init__(self, layer: Linear | Layer) -> None:
        super().__init__()
        self._layer = layer

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        rows = self._layer(inputs.reshape(-1, inputs.shape[-1]).contiguous())
        return rows.view(*inputs.shape[:-1], rows.shape[-1])


class _Gather(torch.nn.Module):
    """A kit's embedding of token ids of any shape."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self._layer = layer

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        rows = self._layer(token_ids.reshape(-1))
        return rows.view(*token_ids.shape, rows.shape[-1])


def can_pack(module: PreTrainedModel) -> bool:
    """Whether every matrix of a module, built on any device, is a linear layer or an embedding."""
    plain = torch.nn.Linear | torch.nn.Embedding
    known = {id(part.weight) for part in module.modules() if isinstance(part, plain)}
    return all(weight.dim() < 2 or id(weight) in known for weight in module.parameters())


def pack(module: PreTrainedModel, kit: LayerKit, dtype: torch.dtype) -> None:
    """Replace the linear layers of dtype, and an embedding that shares its matrix with the output head."""
    shared = {part.weight: (name, part) for name, part in module.named_modules() if type(part) is torch.nn.Embedding}
    tables = {part.weight for part in module.modules() if isinstance(part, torch.nn.Embedding)}
    for name, part in list(module.named_modules()):
        if type(part) is not torch.nn.Linear or part.weight.dtype != dtype:
            continue
        weight, bias = part.weight, part.bias
        ref = WeightRef((name,), (part.out_features,), part.in_features, bias is not None)
        if weight in shared and bias is None:
            gather, head = kit.tied(ref, _Given(weight.data, None))
            module.set_submodule(shared[weight][0], _Gather(gather))
            module.set_submodule(name, _Rows(head))
        elif weight not in tables:  # a packed copy of an embedding that scales its rows would be a second one
            module.set_submodule(name, _Rows(kit.linear(ref, _Given(weight.data, None if bias is None else bias.data))))
