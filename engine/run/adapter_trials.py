"""Tries the kernels of low-rank adapters, with random ones of the largest rank in two slots."""

from collections.abc import Sequence

import numpy as np
import torch
from typing_extensions import override

from weft.engine.config import EngineConfig
from weft.engine.kernels.torch.adapters import TorchSite
from weft.engine.kernels.triton.adapters import TritonSite
from weft.engine.lora.step_rows import Delta, Site, StepRows
from weft.engine.models.config import ModelConfig
from weft.engine.run.settle import Judge, Trial, relative_errors
from weft.engine.tune.trials import Trials

_SLOTS = np.array([0, 1, 2] * 20)
"""Of the rows: more of an adapter than a tile has, and some of none."""


class AdapterTrials(Trials):
    """A square matrix of the hidden size, of which one adapter changes all outputs, the other the first half."""

    def __init__(self, model: ModelConfig, config: EngineConfig) -> None:
        """Take the sizes."""
        self._size, self._rank, self._dtype = model.hidden_size, config.options.max_lora_rank, config.dtype
        self._device = config.device

    @override
    def trial(self, config: EngineConfig) -> Trial:
        site = TritonSite((self._size, self._size), 2, 2, self._rank, self._dtype, self._device)
        return Trial(lambda: self._added(site, self._dtype), lambda: self._added(site, self._dtype))

    @override
    def reference(self) -> Judge:
        return relative_errors(self._added(TorchSite(0), torch.float32))

    def _added(self, site: Site, dtype: torch.dtype) -> Sequence[torch.Tensor]:
        """What the adapters add, in a dtype and in float32."""
        rows, half = StepRows(_SLOTS, self._device), self._size // 2
        generator = torch.Generator(self._device).manual_seed(0)

        def draw(*shape: int) -> torch.Tensor:
            values: torch.Tensor = torch.randn(*shape, generator=generator, device=self._device) / shape[1] ** 0.5
            return values.to(self._dtype).to(dtype)

        inputs = draw(len(_SLOTS), self._size)
        first, second, third = (
            Delta(start, draw(self._rank, self._size), draw(size, self._rank))
            for start, size in ((0, half), (half, self._size - half), (0, half))
        )
        site.put(1, [first, second])
        site.put(2, [third])
        sums = [
            torch.zeros(len(_SLOTS), self._size, dtype=kind, device=self._device) for kind in (dtype, torch.float32)
        ]
        for outputs in sums:
            site.add(outputs, inputs, rows)
        return sums
