"""Computes each step on several ranks.

Other ranks get each batch over a socket before rank 0 launches its own part, and compute hidden states and logits; rank
0 alone samples, and drafts. Where steps are launched before the one before is collected, it gives the others the
sampled ids on the device.
"""

import logging
import os
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from typing_extensions import override

from weft.engine.batch import Batch, RowMasks
from weft.engine.device import to_device
from weft.engine.kernels.torch.caches import Caches
from weft.engine.layers.all_ranks import StageRanks
from weft.engine.layers.block import Decoder, Model
from weft.engine.loop.sight import PictureError
from weft.engine.lora.adapters import Adapters
from weft.engine.ranks.ranks import PATIENCE_S, DropFeatures, KeepFeatures, LoadAdapter, Ranks
from weft.engine.runner.model_runner import Follower, LaunchedStep, ModelRunner
from weft.engine.sampling.sampler import SamplingKernels
from weft.engine.vision.eyes import Encoder, Eyes
from weft.engine.wire.errors import ModelError
from weft.engine.wire.messages import MAX_FRAME_BYTES

logger = logging.getLogger(__name__)


_MAX_BYTES: Final = MAX_FRAME_BYTES - 4096
"""Of features, which go to the other ranks in one frame."""


class RankedEyes(Eyes):
    """Those of the first rank, which alone encodes. The others get the features."""

    def __init__(
        self, ranks: Ranks, decoder: Decoder, encode: Encoder, device: torch.device, embedded_id: int | None
    ) -> None:
        """See `Eyes`."""
        super().__init__(decoder, encode, device, embedded_id)
        self._ranks = ranks

    @override
    def keep(self, key: bytes, features: torch.Tensor) -> None:
        if features.nbytes > _MAX_BYTES:
            fault = f"its features must have at most {_MAX_BYTES} bytes on several ranks, got {features.nbytes}"
            raise PictureError(f"a picture is too large: {fault}")
        super().keep(key, features)
        values = features.contiguous().reshape(-1).view(torch.uint8).cpu()
        self._ranks.send(KeepFeatures(key, features.dtype, tuple(features.shape), values.numpy().tobytes()))

    @override
    def drop(self, key: bytes) -> None:
        super().drop(key)
        self._ranks.send(DropFeatures(key))


class RankedRunner(ModelRunner):
    """The executor of all ranks, in the process of the first."""

    def __init__(
        self,
        ranks: Ranks,
        model: Model,
        caches: Caches,
        device: torch.device,
        draft_model: Follower | None,
        sampling: SamplingKernels,
        adapters: Adapters | None = None,
        eyes: Eyes | None = None,
        *,
        overlap: bool,
    ) -> None:
        """Take over the other ranks, and the model and caches of this one; overlap as in `EngineConfig`."""
        super().__init__(model, caches, device, draft_model, sampling, adapters=adapters, eyes=eyes)
        self._ranks = ranks
        self._overlap = overlap
        self._checker = ThreadPoolExecutor(1, "adapters of ranks")

    @override
    def launch_once(self, batch: Batch, masks: "Future[RowMasks] | None" = None) -> LaunchedStep:
        """See `ModelRunner`. A failure, for want of memory too, leaves ranks waiting for others: it ends the engine."""
        try:
            self._ranks.send(batch)
            launched = super().launch_once(batch, masks)
            if self._overlap and launched.samples is not None:
                dist.broadcast(launched.samples.token_ids, 0, group=StageRanks.group)
            return launched
        except Exception:
            time.sleep(PATIENCE_S)
            logger.exception("a step failed on rank 0, and the engine ends, since the ranks may wait for each other")
            os._exit(1)

    @override
    def load_adapter(self, slot: int, folder: Path) -> "Future[str]":
        """See `ModelRunner`; every rank reads its part of the adapter."""
        self._ranks.send(LoadAdapter(slot, folder))
        return self._checker.submit(self._check, super().load_adapter(slot, folder))

    def _check(self, loading: "Future[str]") -> str:
        """Wait for all ranks, whatever becomes of the first one's part."""
        try:
            contents = self._ranks.check_adapter()
        finally:
            content = loading.result()
        if rank := next((rank for rank, other in enumerate(contents, 1) if other != content), None):
            raise ModelError(f"rank {rank} finds other files there than the first rank")
        return content

    @override
    def prepare(self) -> bool:
        """See `ModelRunner`; what there is to prepare of the model would have to be computed by all."""
        return self._follower is not None and self._follower.prepare()

    def close(self) -> None:
        """End the other ranks."""
        self._ranks.close()


class FollowingRunner(ModelRunner):
    """Computes batches on another rank than the first, which samples."""

    def __init__(
        self,
        model: Model,
        caches: Caches,
        device: torch.device,
        *,
        overlap: bool,
        has_head: bool = True,
        adapters: Adapters | None = None,
        eyes: Eyes | None = None,
    ) -> None:
        """See `RankedRunner`; has_head unless it is of a later stage."""
        super().__init__(model, caches, device, adapters=adapters, eyes=eyes)
        self._overlap = overlap
        self._has_head = has_head

    @torch.inference_mode()
    def follow(self, batch: Batch) -> None:
        """Compute this rank's part of a batch and of its logits."""
        with self._computing(batch):
            self._follow(batch)

    def see(self, told: KeepFeatures | DropFeatures) -> None:
        """Keep the features of a picture, or no longer."""
        assert self._eyes is not None
        if isinstance(told, DropFeatures):
            self._eyes.drop(told.key)
        else:
            features = torch.frombuffer(bytearray(told.data), dtype=told.dtype).view(told.shape)
            self._eyes.keep(told.key, features.to(self._device))

    def _follow(self, batch: Batch) -> None:
        if not self._has_head:
            self.fill_caches(to_device(batch.token_ids, self._device), batch)
            return
        (hidden_states, _), num_rows = self.forward(self._input_ids(batch), batch), len(batch.row_indices)
        if num_rows:
            self._logits(batch, hidden_states)
        if batch.scores:
            deque(self._scored_logits(batch.scores, hidden_states), maxlen=0)
        if self._overlap and num_rows:
            self._previous_token_ids = torch.empty(num_rows, dtype=torch.int64, device=self._device)
            dist.broadcast(self._previous_token_ids, 0, group=StageRanks.group)
