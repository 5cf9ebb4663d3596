"""Tries the kernels of Triton for packed matrices and for low-rank adapters, with random values.

Matrices are packed as `--quantization` or a checkpoint has them: one of each form that the model has, and two of
experts. Adapters have the largest rank, in two slots. The references are products of torch in float32.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
from typing_extensions import override

from weft.engine.config import EngineConfig
from weft.engine.describe.config import ModelConfig
from weft.engine.kernels.choice import choose_kernels
from weft.engine.kernels.torch.layer_kernels import TorchSite
from weft.engine.kernels.triton.layer_kernels import TritonKernels
from weft.engine.kernels.triton.products import TritonSite
from weft.engine.lora.adapted_layers import Delta, Site, StepRows
from weft.engine.tune.compare import Judge, Trial, relative_errors
from weft.engine.tune.trials import Trials, tried_spec
from weft.engine.weights.groups import FP4, Groups, round_matrix
from weft.engine.weights.quantization import Scheme
from weft.engine.weights.reader import ExpertsRef, TensorRef, WeightReader, WeightRef

ROWS = (1, 20, 80, 300)
"""One number for every way in which rows are multiplied."""

_TIMED_ROWS, _MOST_OUTPUTS = 2048, 4096
_NUM_EXPERTS = 2


class PackedPart(NamedTuple):
    """A matrix of the model, or a part of it, and whether it is that of experts."""

    ref: WeightRef
    is_expert: bool


def packed_parts(model: ModelConfig, config: EngineConfig) -> dict[str, PackedPart]:
    """One of each form, by a text of this form; empty if all matrices are plain."""
    kernels = cast(TritonKernels, choose_kernels(model, config))
    found: dict[str, PackedPart] = {}
    for ref in tried_spec(model, config).weights:
        if not isinstance(ref, TensorRef):
            is_expert = isinstance(ref, ExpertsRef)
            matrix = ref.matrix if isinstance(ref, ExpertsRef) else ref
            small = WeightRef(matrix.names[:1], (min(matrix.out_features, _MOST_OUTPUTS),), matrix.in_features)
            if form := kernels.packed_form(matrix, is_expert=is_expert):
                found.setdefault(f"{form}{' of experts' * is_expert}", PackedPart(small, is_expert))
    return found


class PackedTrials(Trials):
    """The matrices that `packed_parts` has found, one after the other.

    They are made as `TritonKernels` makes those of the model. The reference multiplies what the packed values stand
    for, in float32.
    """

    def __init__(self, model: ModelConfig, config: EngineConfig, parts: dict[str, PackedPart]) -> None:
        """Take the matrices."""
        self._model, self._config, self._parts = model, config, list(parts.values())
        self._reader = _RandomReader(model, config)

    @override
    def trial(self, config: EngineConfig) -> Trial:
        products = [(part.ref, self._product(config, part)) for part in self._parts]
        timed = [(product, self._inputs(ref, _TIMED_ROWS)) for ref, product in products]
        return Trial(
            lambda: [product(self._inputs(ref, num_rows)) for ref, product in products for num_rows in ROWS],
            lambda: [product(inputs) for product, inputs in timed],
        )

    @override
    def reference(self) -> Judge:
        exact = []
        for ref, is_expert in self._parts:
            weights = [self._reader.exact(ref, index) for index in range(_NUM_EXPERTS if is_expert else 1)]
            for num_rows in ROWS:
                shares = self._inputs(ref, num_rows).float().tensor_split(len(weights))
                exact.append(torch.cat([rows @ weight.T for rows, weight in zip(shares, weights, strict=True)]))
        return relative_errors(exact)

    def _product(self, config: EngineConfig, part: PackedPart) -> Callable[[torch.Tensor], torch.Tensor]:
        kernels = cast(TritonKernels, choose_kernels(self._model, config))
        if not part.is_expert:
            return kernels.linear(part.ref, self._reader)
        matrix, _ = kernels.packed_experts(ExpertsRef(part.ref, _NUM_EXPERTS), self._reader) or (None, None)
        assert matrix is not None, "random values fit the form"

        def multiply(rows: torch.Tensor) -> torch.Tensor:
            numbers = torch.arange(1, _NUM_EXPERTS + 1, device=rows.device)  # a copy from the host cannot be recorded
            ends = ((numbers * len(rows) + _NUM_EXPERTS - 1) // _NUM_EXPERTS).int()
            return matrix.multiply(rows, None, rows.new_empty(len(rows), matrix.out_features), ends=ends)

        return multiply

    def _inputs(self, ref: WeightRef, num_rows: int) -> torch.Tensor:
        return _draw(self._config, num_rows, num_rows, ref.in_features).to(self._config.dtype)


class _RandomReader(WeightReader):
    """Matrices without biases, as the checkpoint has them, or plain where they are quantized while they are loaded."""

    def __init__(self, model: ModelConfig, config: EngineConfig) -> None:
        self._quantization, self._config = model.quantization, config

    @override
    def dense(self, ref: WeightRef) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._plain(ref, 0), None

    @override
    def groups(self, ref: WeightRef) -> Groups:
        return self._groups(ref, 0)

    @override
    def bias_of(self, ref: WeightRef) -> None:
        return None

    @override
    def experts(self, ref: ExpertsRef) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        return ((self._plain(ref.matrix, index), None) for index in range(ref.num_experts))

    @override
    def expert_groups(self, ref: ExpertsRef) -> Iterator[tuple[Groups | None, torch.Tensor | None]]:
        return ((self._groups(ref.matrix, index), None) for index in range(ref.num_experts))

    @override
    def tensor(self, ref: TensorRef) -> torch.Tensor:
        raise NotImplementedError("products read none")

    def exact(self, ref: WeightRef, index: int) -> torch.Tensor:
        """What the matrix, or that of an expert, stands for."""
        storage = self._config.options.quantization
        if storage == "none":
            return self._groups(ref, index).dequantize(torch.float32)
        return round_matrix(self._plain(ref, index), storage).dequantize(torch.float32)

    def _plain(self, ref: WeightRef, seed: int) -> torch.Tensor:
        return _draw(self._config, seed, ref.out_features, ref.in_features).to(self._config.dtype)

    def _groups(self, ref: WeightRef, seed: int) -> Groups:
        assert self._quantization is not None
        scheme = self._quantization.expected(ref.names[0].format(0))
        assert scheme is not None, "its form is known"
        return random_groups(_draw(self._config, seed, ref.out_features, ref.in_features), scheme)


def random_groups(values: torch.Tensor, scheme: Scheme) -> Groups:
    """Values (out_features, in_features) around 1, rounded to those of a scheme, with scales and zeros of any kind."""
    num_inputs = values.size(1)
    size = (scheme.block[1] if scheme.block else scheme.group_size) or num_inputs
    least, most = -(1 << (scheme.bits - 1)), (1 << (scheme.bits - 1)) - 1
    codes = (values * (most / 3)).clamp(least, most).round().to(torch.int8)
    scales = values[:, : -(-num_inputs // size)].abs() + 0.5
    if scheme.is_float and scheme.bits == 8:
        codes = (values * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    elif scheme.has_table:
        codes = (values * 40).clamp(-127, 127).round().to(torch.int8)
    elif scheme.is_float:
        table = torch.tensor([*FP4, *(-value for value in FP4)], dtype=torch.int8, device=values.device)
        codes, scales = table[(codes + 8).int()], torch.exp2(scales.round() - 4)
    zeros = (2 * scales).round() if scheme.has_zeros else None
    return Groups(codes, scales / 2 ** (num_inputs.bit_length() // 2), zeros, scheme.bits, size)


def _draw(config: EngineConfig, seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator(config.device).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=config.device)


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
