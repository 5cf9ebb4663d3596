"""The source of the tensors of a quantized checkpoint; a decoder for each method makes plain weights of what it has."""

from collections.abc import Callable, Mapping

import torch
from typing_extensions import override

from weft.engine.gguf import tensors as gguf
from weft.engine.weights import awq, bitsandbytes, compressed_tensors, fp8, gptq, modelopt, mxfp4, torchao
from weft.engine.weights.formats import Part, TensorSource
from weft.engine.weights.groups import Groups
from weft.engine.weights.scheme import Quantization
from weft.engine.weights.stored import StoredWeight
from weft.engine.weights.tensor_files import CheckpointSource

_DECODERS: Mapping[str, Callable[[StoredWeight], Groups | None]] = {
    "fp8": fp8.decode,
    "compressed-tensors": compressed_tensors.decode,
    "gptq": gptq.decode,
    "awq": awq.decode,
    "mxfp4": mxfp4.decode,
    "bitsandbytes": bitsandbytes.decode,
    "torchao": torchao.decode,
    "modelopt": modelopt.decode,
    "gguf": gguf.decode_gguf,
}

_UNUSED = (
    *(".input_scale", ".input_zero_point", ".input_global_scale", ".input_scale_ub", ".activation_scale"),
    *(".output_scale", ".output_zero_point", ".q_scale", ".k_scale", ".v_scale", ".kv_scale", ".weight_format"),
)
"""Endings of names: scales of activations, which are not quantized by them, and of K and V (`models/kv_scales.py`)."""


class DecodedSource(TensorSource):
    """A checkpoint of which each rank decodes whole matrices, one at a time, on its device."""

    def __init__(self, checkpoint: CheckpointSource, quantization: Quantization, device: torch.device) -> None:
        """Decode what the checkpoint has quantized; the rest is read as it is."""
        self._checkpoint, self._quantization, self._device = checkpoint, quantization, device
        self._decode = _DECODERS[quantization.method]

    @override
    def groups(self, name: str, shape: tuple[int, int], item: tuple[int, int] | None = None) -> Groups | None:
        return self._decode(StoredWeight(self._checkpoint, self._quantization, self._device, name, shape, item))

    @override
    def fill(
        self, name: str, target: torch.Tensor, item: tuple[int, int] | None = None, part: Part | None = None
    ) -> None:
        shape = part.shape if part else tuple(target.shape)
        groups = self.groups(name, (shape[0], shape[1]), item) if len(shape) == 2 else None
        if groups is None:
            self._checkpoint.fill(name, target, item, part)
        else:
            weight = groups.dequantize(target.dtype)
            target.copy_(weight[part.where] if part else weight)

    @override
    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._checkpoint.shape(name)

    @override
    def close(self) -> None:
        self._checkpoint.close(self._is_unused)

    def _is_unused(self, name: str) -> bool:
        """AutoGPTQ also writes biases of zeros, of matrices that have none."""
        if name.endswith(".bias") and self._checkpoint.has(f"{name.removesuffix('.bias')}.qweight"):
            return not self._checkpoint.take(name).any()
        return name.endswith(_UNUSED)
