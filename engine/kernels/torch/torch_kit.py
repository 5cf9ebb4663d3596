"""The kit of torch's own operations, for any device."""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F

from weft.engine.kernels.torch.linear import OnednnLinear, TorchLinear
from weft.engine.kernels.torch.tiled_linear import TiledLinear, forbid_split_sums
from weft.engine.layers.attention import PagedCache
from weft.engine.layers.block import Block
from weft.engine.layers.gated import TorchGated
from weft.engine.layers.norm import HeadNorm, RMSNorm
from weft.engine.layers.parts import HeadLayer, Layer, Linear
from weft.engine.layers.rotary import rotate
from weft.engine.weights.reader import WeightReader
from weft.engine.weights.refs import WeightRef

_KIT_NAMES = {
    TorchLinear: "torch",
    OnednnLinear: "torch with oneDNN",
    TiledLinear: "torch in fixed tiles",
}


class TorchKit:
    """torch's operations, with matrices of one kind."""

    def __init__(self, linear: type[TorchLinear] = TorchLinear, name: str | None = None) -> None:
        """OneDNN's linear layer is for bfloat16 on CPUs that have instructions for it; name is for the log."""
        self.name = name or _KIT_NAMES[linear]
        self._linear = linear

    def linear_bytes(self, ref: WeightRef, dtype: torch.dtype) -> int:
        """See `LayerKit`."""
        return ref.num_values * dtype.itemsize

    def tied_bytes(self, ref: WeightRef, dtype: torch.dtype) -> int:
        """See `LayerKit`; oneDNN's layout is a copy."""
        return self.linear_bytes(ref, dtype) * (2 if self._linear is OnednnLinear else 1)

    def linear(self, ref: WeightRef, reader: WeightReader) -> TorchLinear:
        """See `LayerKit`."""
        return self._linear(*reader.dense(ref))

    def gated(self, ref: WeightRef, reader: WeightReader, activation: str) -> Layer:
        """See `LayerKit`."""
        return TorchGated(self.linear(ref, reader), activation)

    def embedding(self, ref: WeightRef, reader: WeightReader) -> Layer:
        """See `LayerKit`."""
        return partial(F.embedding, weight=reader.dense(ref)[0])

    def tied(self, ref: WeightRef, reader: WeightReader) -> tuple[Layer, Linear]:
        """See `LayerKit`."""
        table, _ = reader.dense(ref)
        return partial(F.embedding, weight=table), self._linear(table)

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

    def fuse(self, blocks: Sequence[Block]) -> Sequence[Block]:
        """See `LayerKit`."""
        return blocks


def torch_kit(device: torch.device, dtype: torch.dtype, is_deterministic: bool = False) -> TorchKit:
    """With oneDNN's layout for bfloat16 on a CPU that has bfloat16 instructions; with fixed tiles if deterministic."""
    if is_deterministic:
        forbid_split_sums()
        return TorchKit(TiledLinear)
    if device.type != "cpu" or dtype != torch.bfloat16:
        return TorchKit()
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return TorchKit(OnednnLinear if has_onednn and torch.ops.mkldnn._is_mkldnn_bf16_supported() else TorchLinear)
