"""Tries the sampler and the experts of a layer.

The sampler gets random logits over the model's vocabulary. Only experts of plain matrices are tried here: they get
random weights, and every token chooses its experts alike.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import cached_property

import numpy as np
import torch
from typing_extensions import override

from weft.engine.batch import SamplingBatch
from weft.engine.config import EngineConfig
from weft.engine.describe.config import ModelConfig, ModelFacts
from weft.engine.device import to_device
from weft.engine.kernels.choice import choose_kernels, choose_sampling
from weft.engine.kernels.torch import layer_kernels as filters
from weft.engine.kernels.torch.layer_kernels import TorchKernels
from weft.engine.layers.feed_forward import choose
from weft.engine.layers.kernels import LayerKernels
from weft.engine.parts.experts import ExpertsSpec
from weft.engine.runner.dummy_batch import dummy_batch, penalised
from weft.engine.sampling.edits import edit_logits
from weft.engine.sampling.sampler import sample
from weft.engine.tune.compare import Judge, Outputs, Trial, relative_errors
from weft.engine.tune.trials import RandomWeights, Trials
from weft.engine.weights.reader import DenseReader


class SamplerTrials(Trials):
    """Rows of every kind: greedy, random, with each filter, and penalised."""

    def __init__(self, model: ModelFacts, config: EngineConfig) -> None:
        """Take the vocabulary of the model."""
        self._vocab_size, self._device = model.vocab_size, config.device
        self._batch = _sampling_batch(min(model.vocab_size, 8))

    @override
    def trial(self, config: EngineConfig) -> Trial:
        kernels = choose_sampling(config)

        def run() -> list[torch.Tensor]:
            return [sample(self._logits.clone(), self._batch, None, kernels=kernels).token_ids]

        return Trial(run, run)

    @override
    def reference(self) -> Judge:
        return _distances(self._logits.clone(), self._batch)

    @cached_property
    def _logits(self) -> torch.Tensor:
        generator = torch.Generator(self._device).manual_seed(0)
        shape = len(self._batch.temperatures), self._vocab_size
        return 3 * torch.randn(*shape, generator=generator, device=self._device)


def _sampling_batch(num_rows: int) -> SamplingBatch:
    """Rows of every kind in turn; the last one is penalised."""
    rows = np.arange(num_rows)
    greedy = dummy_batch(num_rows, (), 1, num_rows).sampling
    return dataclasses.replace(
        greedy,
        temperatures=np.where(rows % 4 == 0, 0, 0.8).astype(np.float32),
        top_ks=np.where(rows % 4 == 1, 40, 0),
        top_ps=np.where(rows % 4 == 2, 0.9, 1).astype(np.float32),
        min_ps=np.where(rows % 4 == 3, 0.02, 0).astype(np.float32),
        uniforms=(0.618 * rows % 1).astype(np.float32),
        penalties=penalised(num_rows - 1, rows, rows % 2),
    )


def _distances(logits: torch.Tensor, batch: SamplingBatch) -> Judge:
    """A judge for sampled ids: how far a row's uniform number is from the id's share of the probability, at most.

    Not whether ids are equal, because sums in another order may move the border between two ids. For a greedy row it is
    1 if the id is not the best one.
    """
    edit_logits(logits, batch, None)
    best = logits.argmax(-1)
    is_greedy = to_device(batch.temperatures, logits.device) == 0
    temperatures = to_device(np.where(batch.temperatures > 0, batch.temperatures, 1).astype(np.float32), logits.device)
    weights = ((logits - logits.amax(-1, keepdim=True)) / temperatures[:, None]).exp_()
    weights.mul_(weights >= filters.weight_floors(weights, batch.top_ks, batch.top_ps, batch.min_ps))
    cumulated = weights.cumsum(-1, dtype=torch.float64)
    uniforms = to_device(batch.uniforms, logits.device)

    def judge(outputs: Outputs) -> float:
        (token_ids,) = outputs
        if bool(((token_ids < 0) | (token_ids >= logits.size(1))).any()):
            return math.inf
        at = token_ids[:, None]
        ends, totals = cumulated.gather(1, at)[:, 0], cumulated[:, -1]
        starts = ends - weights.gather(1, at)[:, 0]
        distances = torch.maximum(starts / totals - uniforms, uniforms - ends / totals).clamp_(min=0)
        return float(torch.where(is_greedy, (token_ids != best).double(), distances).max())

    return judge


_ROWS = (1, 1024, 64)
"""Tokens: one, so many that experts have many, and what is timed."""


class ExpertsTrials(Trials):
    """The experts of one layer."""

    def __init__(self, model: ModelConfig, config: EngineConfig, spec: ExpertsSpec) -> None:
        """Take their description."""
        self._model, self._config, self._spec = model, config, spec

    @override
    def trial(self, config: EngineConfig) -> Trial:
        products = self._products(choose_kernels(self._model, config), config.dtype)
        return Trial(lambda: [product() for product in products], products[-1])

    @override
    def reference(self) -> Judge:
        return relative_errors([product() for product in self._products(TorchKernels(), torch.float32)])

    def _products(self, kernels: LayerKernels, dtype: torch.dtype) -> list[Callable[[], torch.Tensor]]:
        """What computes each number of tokens: (num_tokens, hidden_size)."""
        spec, device = self._spec, self._config.device
        reader = DenseReader(RandomWeights(0, self._config.dtype, device, 1.0), device, dtype, 0)
        experts = kernels.experts(spec.gate_up, spec.down, reader, spec.gating)
        generator = torch.Generator(device).manual_seed(0)

        def product(num_tokens: int) -> Callable[[], torch.Tensor]:
            values = torch.randn(num_tokens, self._model.hidden_size, generator=generator, device=device)
            inputs = values.to(self._config.dtype).to(dtype)
            ids, shares = choose(spec.routing, values.new_zeros(num_tokens, spec.gate_up.num_experts), None)

            def compute() -> torch.Tensor:
                sums = torch.zeros_like(inputs)
                experts.add_to(sums, inputs, ids, shares)
                return sums

            return compute

        return [product(num_tokens) for num_tokens in _ROWS]
