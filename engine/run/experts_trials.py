"""Tries the products of plain experts alone, with random weights and steady choices."""

from collections.abc import Callable

import torch
from typing_extensions import override

from weft.engine.config import EngineConfig
from weft.engine.kernels.torch.torch_kit import TorchKit
from weft.engine.layers.kit import LayerKit
from weft.engine.models.config import ModelConfig
from weft.engine.models.experts import ExpertsSpec
from weft.engine.run.kernel_choice import choose_kit
from weft.engine.run.settle import Judge, Trial, relative_errors
from weft.engine.tune.trials import RandomWeights, Trials
from weft.engine.weights.formats import DenseReader

_ROWS = (1, 1024, 64)
"""Tokens: one, so many that experts have many, and what is timed."""


class ExpertsTrials(Trials):
    """The experts of one layer."""

    def __init__(self, model: ModelConfig, config: EngineConfig, spec: ExpertsSpec) -> None:
        """Take their description."""
        self._model, self._config, self._spec = model, config, spec

    @override
    def trial(self, config: EngineConfig) -> Trial:
        products = self._products(choose_kit(self._model, config), config.dtype)
        return Trial(lambda: [product() for product in products], products[-1])

    @override
    def reference(self) -> Judge:
        return relative_errors([product() for product in self._products(TorchKit(), torch.float32)])

    def _products(self, kit: LayerKit, dtype: torch.dtype) -> list[Callable[[], torch.Tensor]]:
        """What computes each number of tokens: (num_tokens, hidden_size)."""
        spec, device = self._spec, self._config.device
        reader = DenseReader(RandomWeights(0, self._config.dtype, device, 1.0), device, dtype, 0)
        experts = kit.experts(spec.gate_up, spec.down, reader, spec.gating)
        generator = torch.Generator(device).manual_seed(0)

        def product(num_tokens: int) -> Callable[[], torch.Tensor]:
            values = torch.randn(num_tokens, self._model.hidden_size, generator=generator, device=device)
            inputs = values.to(self._config.dtype).to(dtype)
            ids, shares = spec.routing.choose(values.new_zeros(num_tokens, spec.gate_up.num_experts), None)

            def compute() -> torch.Tensor:
                sums = torch.zeros_like(inputs)
                experts.add_to(sums, inputs, ids, shares)
                return sums

            return compute

        return [product(num_tokens) for num_tokens in _ROWS]
