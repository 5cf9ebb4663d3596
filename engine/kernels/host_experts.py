"""Experts that do not fit the device: they stay in host memory, and the CPU computes them.

In such a layer, router, shared experts and all else are the device's. Its hidden states, the ids of chosen experts and
their shares go to the host in one copy, the CPU's kernels compute the experts there, and their sums come back in
another: one round trip a layer, for which the host waits. What else the layer launches, such as its shared expert, is
queued before that wait, so the device computes it in the meantime. A step that waits cannot be a CUDA graph.

On the CPU nothing is copied, so that tests hold these layers against the ordinary ones there.
"""

from collections.abc import Callable, Iterable
from typing import cast

import torch
from torch import Tensor
from typing_extensions import override

from weft.engine.device import Download, upload
from weft.engine.families.experts import Gating
from weft.engine.layers.feed_forward import Experts
from weft.engine.layers.kernels import LayerKernels
from weft.engine.parts.experts import ExpertsSpec
from weft.engine.weights.reader import ExpertsRef, WeightReader


class HostExperts(Experts):
    """Experts of the CPU for hidden states on a device."""

    def __init__(self, experts: Experts) -> None:
        """Take experts whose weights are in host memory."""
        self.experts = experts

    @override
    def add_to(self, residual: Tensor, inputs: Tensor, ids: Tensor, shares: Tensor) -> None:
        self.start(residual, inputs, ids, shares)()

    @override
    def start(self, residual: Tensor, inputs: Tensor, ids: Tensor, shares: Tensor) -> Callable[[], None]:
        """See `Experts.start`: the copy to the host is queued, and the rest is left to what is returned."""
        download = Download((inputs, ids, shares), residual.device)

        def finish() -> None:
            inputs, ids, shares = download.wait()
            sums = torch.zeros_like(inputs)
            self.experts.add_to(sums, inputs, ids, shares)
            residual.add_(upload(sums, residual.device))

        return finish


class HostedKernels:
    """`LayerKernels` that leave the experts of some layers to those of the CPU, and make all else by the inner ones."""

    def __init__(self, kernels: LayerKernels, host: LayerKernels, layers: Iterable[ExpertsSpec]) -> None:
        """Take the kernels of the device and those of the CPU, which make the experts of these layers."""
        self._kernels, self._host = kernels, host
        self._hosted = frozenset(layer.gate_up for layer in layers)

    @classmethod
    def around(cls, kernels: LayerKernels, host: LayerKernels, layers: Iterable[ExpertsSpec]) -> LayerKernels:
        """The kernels with these layers' experts in host memory."""
        return cast(LayerKernels, cls(kernels, host, layers))

    def __getattr__(self, name: str) -> object:
        return getattr(self._kernels, name)

    def experts_bytes(self, gate_up: ExpertsRef, down: ExpertsRef, gating: Gating, dtype: torch.dtype) -> int:
        """See `LayerKernels`; bytes of the device alone."""
        return 0 if gate_up in self._hosted else self._kernels.experts_bytes(gate_up, down, gating, dtype)

    def experts(self, gate_up: ExpertsRef, down: ExpertsRef, reader: WeightReader, gating: Gating) -> Experts:
        """See `LayerKernels`; those of the host are read straight into its memory."""
        if gate_up not in self._hosted:
            return self._kernels.experts(gate_up, down, reader, gating)
        return HostExperts(self._host.experts(gate_up, down, reader.on_host(), gating))
