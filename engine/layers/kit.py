"""The seam between a model and the way its layers are computed.

A kit makes layers from weights, which then belong to the layers alone: a kit that packs a weight frees the plain one.
`TorchKit` runs on any device, `engine.native.kit` has faster ones for the CPU; quantization and sharding are further
kits.
"""

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F

from engine.attention.backend import PagedCache
from engine.layers.gated import TorchGated
from engine.layers.linear import OnednnLinear, TorchLinear
from engine.layers.norm import HeadNorm, RMSNorm
from engine.layers.rotary import rotate
from engine.layers.stack import DecoderLayer, HeadLayer, Layer, LayerStack, Linear, PlainStack
from engine.layers.tiled_linear import TiledLinear, forbid_split_sums


class LayerKit(Protocol):
    """Makes the layers of one model.

    Attributes:
        copies_tied_table: Whether the output head is a copy of the embedding that it is tied to.
        is_int8: Whether a matrix takes one byte a value and one float32 an output, instead of what its dtype takes.
    """

    name: str
    copies_tied_table: bool
    is_int8: bool

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """Weight (out_features, in_features), bias (out_features,)."""

    def gated(self, weight: torch.Tensor, bias: torch.Tensor | None, activation: str) -> Layer:
        """Weight (2 * intermediate_size, hidden_size), gate first -> activation(gate(x)) * up(x)."""

    def tied(self, table: torch.Tensor) -> tuple[Layer, Linear]:
        """Embedding and output head over one table (vocab_size, hidden_size)."""

    def norm(self, weight: torch.Tensor, eps: float) -> Layer:
        """RMSNorm over the last dimension; weight may be float32 beside hidden states of another dtype."""

    def heads(self, norm: HeadNorm | None, num_heads: int, num_kv_heads: int) -> HeadLayer:
        """Norm of queries and keys, where there is one, then rotary embedding."""

    def stack(self, layers: Sequence[DecoderLayer], head_dim: int) -> LayerStack:
        """All layers, which this kit made."""


def embedding(table: torch.Tensor) -> Layer:
    """Token ids (num_tokens,) -> rows of table (vocab_size, hidden_size)."""
    return partial(F.embedding, weight=table)


_KIT_NAMES = {
    TorchLinear: "torch",
    OnednnLinear: "torch with oneDNN",
    TiledLinear: "torch in fixed tiles",
}


class TorchKit:
    """torch's operations, with matrices of one kind."""

    is_int8 = False

    def __init__(self, linear: type[TorchLinear] = TorchLinear) -> None:
        """OneDNN's linear layer is for bfloat16 on CPUs that have instructions for it."""
        self.name = _KIT_NAMES[linear]
        self.copies_tied_table = linear is OnednnLinear
        self._linear = linear

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> TorchLinear:
        """See `LayerKit`."""
        return self._linear(weight, bias)

    def gated(self, weight: torch.Tensor, bias: torch.Tensor | None, activation: str) -> Layer:
        """See `LayerKit`."""
        return TorchGated(self._linear(weight, bias), activation)

    def tied(self, table: torch.Tensor) -> tuple[Layer, Linear]:
        """See `LayerKit`."""
        return embedding(table), self._linear(table)

    def norm(self, weight: torch.Tensor, eps: float) -> Layer:
        """See `LayerKit`."""
        return RMSNorm(weight, eps)

    def heads(self, norm: HeadNorm | None, num_heads: int, num_kv_heads: int) -> HeadLayer:
        """See `LayerKit`."""

        def prepare(
            qkv: torch.Tensor, rotation: torch.Tensor, cache: PagedCache | None
        ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            assert cache is None, "these layers leave writing to attention"
            # Queries and keys go through norm and rotation as one tensor: half as many operations.
            heads, values = qkv.split_with_sizes((num_heads + num_kv_heads, num_kv_heads), dim=1)
            heads = rotate(norm(heads) if norm else heads, rotation)
            queries, keys = heads.split_with_sizes((num_heads, num_kv_heads), dim=1)
            return queries, keys, values

        return prepare

    def stack(self, layers: Sequence[DecoderLayer], head_dim: int) -> LayerStack:
        """See `LayerKit`."""
        return PlainStack(layers, head_dim)


def torch_kit(device: torch.device, dtype: torch.dtype, is_deterministic: bool = False) -> TorchKit:
    """With oneDNN's layout for bfloat16 on a CPU that has bfloat16 instructions; with fixed tiles if deterministic."""
    if is_deterministic:
        forbid_split_sums()
        return TorchKit(TiledLinear)
    if device.type != "cpu" or dtype != torch.bfloat16:
        return TorchKit()
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return TorchKit(OnednnLinear if has_onednn and torch.ops.mkldnn._is_mkldnn_bf16_supported() else TorchLinear)
