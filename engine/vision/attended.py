"""Keeps what layers attend to of pictures, and runs the steps whose tokens see some (see `parts/picture_attention`).

What is kept of a picture are keys and values, of all these layers. They are made once, before a step first needs them,
whichever request that is for, and the KV cache has no place for them. So they need room of their own, which is planned.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from weft.engine.batch_inputs import PictureTokens
from weft.engine.describe.config import ModelConfig
from weft.engine.device import to_device
from weft.engine.families.llama import PictureLayers
from weft.engine.layers.block import Decoder, StepCaches
from weft.engine.parts.picture_attention import PictureBlock, PictureCaches, PictureRun
from weft.engine.vision.eyes import KEPT_BYTES, Encoder, Eyes

_PICTURES: Final[Mapping[str, int]] = {"cpu": 8, "cuda": 32}


def most_pictures(device: torch.device) -> int:
    """Pictures that there is room for, however large, and so those that a request may have."""
    return _PICTURES[device.type]


def kept_bytes(model: ModelConfig, dtype: torch.dtype, device: torch.device) -> int:
    """Room for what is kept of pictures, by a model that sees some."""
    layers, vision = model.switches.extension, model.vision
    if vision is None or not vision.num_attended or not isinstance(layers, PictureLayers):
        return KEPT_BYTES
    num_values = 2 * model.num_kv_heads * model.head_dim * len(layers.indices) * vision.num_attended
    return most_pictures(device) * num_values * dtype.itemsize


class AttendingEyes(Eyes):
    """`Eyes` of a decoder whose layers attend to pictures."""

    def __init__(self, decoder: Decoder, encode: Encoder, device: torch.device) -> None:
        """Keep nothing yet; encode makes features, (num_features, hidden_size)."""
        layers = [block for block in decoder.blocks if isinstance(block, PictureBlock)]

        def seen(arrays: Mapping[str, Tensor]) -> Tensor:
            features = encode(arrays)
            return torch.stack([layer.seen(features) for layer in layers])[None]  # all that its one token stands for

        super().__init__(decoder, seen, device)

    @override
    def forward(
        self,
        pictures: Sequence[PictureTokens],
        token_ids: Tensor,
        positions: Tensor,
        caches: StepCaches,
        rows: Tensor | None,
    ) -> Tensor:
        kept = {part.key: self._kept[part.key][0] for part in pictures}
        keys_of = dict[int, tuple[bytes, ...]]()
        for part in pictures:
            for token in part.targets.tolist():
                keys_of[token] = (*keys_of.get(token, ()), part.key)
        tokens_of = dict[tuple[bytes, ...], list[int]]()
        for token, keys in keys_of.items():
            tokens_of.setdefault(keys, []).append(token)
        runs = tuple(
            PictureRun(to_device(np.array(tokens), self._device), [kept[key] for key in keys])
            for keys, tokens in tokens_of.items()
        )
        seeing = PictureCaches(caches.attention, caches.states, caches.passed, caches.tapped, runs)
        return self._decoder.forward(token_ids, positions, seeing, rows)
