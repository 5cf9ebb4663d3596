"""Computes the features of pictures, keeps them, and puts them in the place of the embeddings of their tokens.

Which are computed, when, and for how long they are kept, the engine decides between two steps (`engine/loop/sight.py`).
The language part of the model knows nothing of all this: it gets embeddings.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from weft.engine.batch_inputs import PictureTokens
from weft.engine.device import to_device
from weft.engine.layers.block import Decoder, StepCaches
from weft.engine.loop.sight import Features, Part, PictureError
from weft.engine.parts.stacked import stack
from weft.engine.vision.shared import values_of
from weft.engine.vision.slices import Slices
from weft.engine.wire.machine import format_size
from weft.engine.wire.pictures import Picture

KEPT_BYTES: Final = 256 << 20
"""Of features that are kept."""
Encoder = Callable[[Mapping[str, Tensor]], Tensor]
"""Takes the arrays of one picture; returns its features, (num_features, hidden_size * (1 + num_stacked))."""


class Eyes(Features):
    """A decoder that sees. Owns the features that are kept."""

    def __init__(
        self, decoder: Decoder, encode: Encoder | None, device: torch.device, embedded_id: int | None = None
    ) -> None:
        """Keep nothing yet; encode is None where another rank encodes, embedded_id is that of `Vision`."""
        self._embedded_id = embedded_id
        self._decoder, self._encode, self._device = decoder, encode, device
        self._kept: dict[bytes, Tensor] = {}
        self._num_threads = torch.get_num_threads()  # of which kernels leave torch a single one later

    @override
    def encode(self, key: bytes, picture: Picture, num_features: int) -> Iterator[Part]:
        slices = Slices(partial(self._features, picture), self._num_threads)
        while not slices.go_on():
            yield None
        if len(features := slices.result()) != num_features:
            raise PictureError(f"a picture has {num_features} tokens, and the model makes {len(features)} of it")
        self.keep(key, features)
        yield features.nbytes, slices.seconds

    def _features(self, picture: Picture) -> Tensor:
        assert self._encode is not None
        features = self._encode(tensors(picture, self._device))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return features

    def keep(self, key: bytes, features: Tensor) -> None:
        """Keep the features of a picture, (num_features, width)."""
        self._kept[key] = features

    @override
    def drop(self, key: bytes) -> None:
        del self._kept[key]

    def forward(
        self,
        pictures: Sequence[PictureTokens],
        token_ids: Tensor,
        positions: Tensor,
        caches: StepCaches,
        rows: Tensor | None,
    ) -> Tensor:
        """`Decoder.forward` of a step that computes tokens of pictures, whose features are kept."""
        if self._embedded_id is not None:
            all_targets = to_device(np.concatenate([part.targets for part in pictures]), self._device)
            token_ids = token_ids.index_fill(0, all_targets, self._embedded_id)
        hidden, stacked, size = self._decoder.embedding(token_ids).clone(), [], 0  # which the kernels may use again
        for part in pictures:
            features = self._kept[part.key][part.first : part.first + len(part.targets)]
            targets, size = to_device(part.targets, self._device), min(hidden.size(1), features.size(1))
            hidden[:, :size].index_copy_(0, targets, features[:, :size].to(hidden.dtype))  # before inputs of layers
            stacked.append((targets, features[:, size:]))
        stack(caches, stacked, size)
        return self._decoder.forward_embedded(hidden, positions, caches, rows)


def bounded(encode: Encoder, bytes_per_pixel: float, free_bytes: Callable[[], int]) -> Encoder:
    """An encoder that refuses a picture which takes more memory than is free: the system would end the process for it.

    Args:
        bytes_per_pixel: What it takes for each of the picture's values.
    """

    def encode_if_it_fits(arrays: Mapping[str, Tensor]) -> Tensor:
        num_values = sum(array.numel() for array in arrays.values() if array.is_floating_point())
        if (taken := int(num_values * bytes_per_pixel)) > (free := free_bytes()):
            sizes = f"about {format_size(taken)} of memory, of which {format_size(free)} are free"
            raise PictureError(f"a picture is too large: to encode it takes {sizes}")
        return encode(arrays)

    return encode_if_it_fits


def tensors(picture: Picture, device: torch.device) -> dict[str, Tensor]:
    """The arrays of a picture on a device. On the CPU they may be the memory that a server shares.

    Raises:
        PictureError: That is not there.
    """
    found, values = {}, values_of(picture)
    for name, array in picture.arrays.items():
        count = math.prod(array.shape)
        kind = {"bfloat16": "int16"}.get(array.dtype, array.dtype)  # as large: numpy knows no bfloat16
        part = np.frombuffer(values, np.dtype(kind), count, array.start).reshape(array.shape)
        whole = torch.from_numpy(np.require(part, requirements=("A", "W")))  # aligned and writeable
        found[name] = whole.view(getattr(torch, array.dtype)).to(device)
    return found
