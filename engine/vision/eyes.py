"""Computes the features of pictures, keeps them, and puts them in the place of the embeddings of their tokens.

The features of a picture are computed once, when a step first needs some of them, and kept until newer ones need the
room. The language part of the model knows nothing of all this: it gets embeddings.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from weft.engine.batch_inputs import PictureTokens
from weft.engine.device import to_device
from weft.engine.layers.block import Decoder, StepCaches
from weft.engine.wire.pictures import Picture

KEPT_BYTES: Final = 256 << 20
"""Of features that are kept."""
Encoder = Callable[[Mapping[str, Tensor]], Tensor]
"""Takes the arrays of one picture; returns its features, (num_features, hidden_size)."""


class Eyes:
    """A decoder that sees. Owns the features that are kept.

    Attributes:
        num_encoded: Pictures whose features were computed.
    """

    def __init__(
        self,
        decoder: Decoder,
        encode: Encoder,
        device: torch.device,
        kept_bytes: int = KEPT_BYTES,
        embedded_id: int | None = None,
    ) -> None:
        """Keep nothing yet; embedded_id is that of `Vision`."""
        self._embedded_id = embedded_id
        self._decoder, self._encode, self._device = decoder, encode, device
        self._kept = OrderedDict[bytes, Tensor]()  # the least recently used first
        self._room = kept_bytes
        self.num_encoded = 0

    def forward(
        self,
        pictures: Sequence[PictureTokens],
        token_ids: Tensor,
        positions: Tensor,
        caches: StepCaches,
        rows: Tensor | None,
    ) -> Tensor:
        """`Decoder.forward` of a step that computes tokens of pictures.

        Raises:
            RuntimeError: A picture has more or fewer features than tokens.
        """
        if self._embedded_id is not None:
            targets = to_device(np.concatenate([part.targets for part in pictures]), self._device)
            token_ids = token_ids.index_fill(0, targets, self._embedded_id)
        hidden = self._decoder.embedding(token_ids).clone()  # which may be memory that the kernels use again
        for part in pictures:
            features = self._features(part)[part.first : part.first + len(part.targets)]
            own = hidden[:, : features.shape[1]]  # behind them a token may have inputs of layers
            own.index_copy_(0, to_device(part.targets, self._device), features.to(hidden.dtype))
        return self._decoder.forward_embedded(hidden, positions, caches, rows)

    def _features(self, part: PictureTokens) -> Tensor:
        found = self._kept.pop(part.key, None)
        if found is None:
            found = self._encode(tensors(part.picture, self._device))
            if len(found) != part.num_features:
                raise RuntimeError(f"a picture has {part.num_features} tokens, and {len(found)} features")
            self.num_encoded += 1
            self._room -= found.nbytes
        self._kept[part.key] = found
        while self._room < 0 and self._kept:
            self._room += self._kept.popitem(last=False)[1].nbytes
        return found


def tensors(picture: Picture, device: torch.device) -> dict[str, Tensor]:
    """The arrays of a picture on a device."""
    found = {}
    for name, array in picture.arrays.items():
        count = math.prod(array.shape)
        values = np.frombuffer(picture.data, np.dtype(array.dtype), count, array.start)
        found[name] = torch.from_numpy(values.reshape(array.shape).copy()).to(device)
    return found
