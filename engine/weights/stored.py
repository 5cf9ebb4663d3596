"""The tensors that a quantized checkpoint has in place of one weight."""

from dataclasses import dataclass

import torch

from weft.engine.shared.errors import ModelError
from weft.engine.weights.groups import Groups, e8m0
from weft.engine.weights.scheme import Quantization, Scheme
from weft.engine.weights.tensor_files import CheckpointSource, misshapen

_ENDINGS = (".weight", ".weight_packed", ".qweight", "._weight_qdata")
_EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """Takes tensors by name; every one that is taken counts as used.

    Attributes:
        name: Of the weight, as it would be called if it were not quantized.
        shape: Its outputs and inputs.
        item: Which of how many, if the tensors hold several weights along their first dimension.
    """

    checkpoint: CheckpointSource
    quantization: Quantization
    device: torch.device
    name: str
    shape: tuple[int, int]
    item: tuple[int, int] | None = None

    @property
    def module(self) -> str:
        """Name without `.weight`."""
        return self.name.removesuffix(".weight")

    @property
    def scheme(self) -> Scheme:
        """How the weight is stored; config.json names modules as the files do."""
        names = (self.checkpoint.name_in_files(self.module + ending) for ending in _ENDINGS)
        return self.quantization.scheme(next((name.rpartition(".")[0] for name in names if name), self.module))

    def has(self, name: str) -> bool:
        """Whether the checkpoint has such a tensor."""
        return self.checkpoint.has(name)

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """A tensor on the device, or the item of it; raises ModelError if it has another shape, if one is given."""
        tensor = self.checkpoint.take(name)
        if self.item:
            index, count = self.item
            if not tensor.dim() or len(tensor) != count:
                raise misshapen(name, tensor, (count, *shape))
            tensor = tensor[index]
        if shape and tensor.shape != shape:
            raise misshapen(name, tensor, shape)
        return tensor.to(self.device)

    def scales(self, name: str, scheme: Scheme, tensor: torch.Tensor | None = None) -> torch.Tensor:
        """Scales or zero points as (out_features, number of groups), in float32, of the name or of the tensor.

        Bytes are exponents, as the microscaling formats have them.
        """
        (outputs, inputs), (rows, columns) = self.shape, scheme.block or (1, scheme.group_size or self.shape[1])
        given = self.take(name) if tensor is None else tensor
        values = e8m0(given) if given.dtype in _EXPONENTS else given.float()
        if scheme.block is None and scheme.group_size is None and values.numel() == 1:
            return values.reshape(1, 1).expand(outputs, 1)
        expected = (-(-outputs // rows), -(-inputs // columns))
        if expected[1] == 1 and values.shape == expected[:1]:
            values = values[:, None]
        if values.shape != expected:
            raise misshapen(name, given, expected)
        return values.repeat_interleave(rows, 0)[:outputs] if rows > 1 else values

    def groups(self, values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None = None) -> Groups:
        """Of values (out_features, in_features); zero points that are all 0 are left out."""
        scheme = self.scheme
        size = scheme.block[1] if scheme.block else scheme.group_size or self.shape[1]
        return Groups(values, scales, zeros if zeros is not None and zeros.any() else None, scheme.bits, size)

    def group_of(self, name: str, num_groups: int) -> torch.Tensor | None:
        """The group of each input; None if they lie one after another."""
        inputs = self.shape[1]
        if not self.has(name):
            return None
        groups = self.take(name, inputs).long()
        if groups.min() == groups.max() == -1:  # unused
            return None
        if groups.min() < 0 or groups.max() >= num_groups:
            raise ModelError(f"tensor {name} names groups outside of 0 to {num_groups - 1}")
        in_order = torch.arange(inputs, device=groups.device) // (self.scheme.group_size or inputs)
        return None if torch.equal(groups, in_order) else groups
