"""Mixers of state space models: Mamba (Gu and Dao, 2023), Mamba 2 (Dao and Gu, 2024), and mixers side by side.

A mixer has two caches: that of its convolution and, with the next index, that of its state space. Each description
builds the mixer above it.
"""

from dataclasses import dataclass, replace
from typing import Self

import torch
from typing_extensions import override

from weft.engine.cache.specs import StateSpec
from weft.engine.describe.config import ModelConfig
from weft.engine.describe.cut import Cut, rows
from weft.engine.describe.specs import MixerSpec, NormSpec, OutputSpec
from weft.engine.describe.tensor_names import attention_spec, mixer_spec, output_spec
from weft.engine.families.hybrids import AttentionAndMamba2
from weft.engine.families.mamba import Mamba2Switches, MambaSwitches
from weft.engine.layers.all_ranks import of_all_ranks
from weft.engine.layers.block import BlockStep, Layer, Linear, Mixer, ProjectedMixer, unchanged
from weft.engine.layers.kernels import LayerKernels
from weft.engine.layers.norm import RMSNorm
from weft.engine.layers.recurrence import CausalConvolution, SelectiveScan, StateSpace, StateSpaceScan
from weft.engine.layers.wrapped_linear import LinearWithEpilogue
from weft.engine.parts.linear_attention import ConvolutionSpec, convolution_spec
from weft.engine.weights.reader import TensorRef, WeightReader, WeightRef


@dataclass(frozen=True, slots=True)
class MambaMixer(ProjectedMixer):
    """Mamba.

    Attributes:
        inputs: Makes the input of the convolution, then the gate.
        selection: Makes what time steps are made of, then b and c, of these sizes.
        selection_norms: Norms of those three; empty for none.
        times: Makes the time steps.
    """

    inputs: Linear
    convolution: CausalConvolution
    selection: Linear
    sizes: tuple[int, int, int]
    selection_norms: tuple[Layer, ...]
    times: Linear
    scan: SelectiveScan
    output: Linear
    cache: int

    @override
    def mix(self, normed: torch.Tensor, step: BlockStep) -> torch.Tensor:
        states = step.caches.kept
        x, gate = self.inputs(normed).chunk(2, 1)
        x = self.convolution.step(x, states, self.cache)
        times, b, c = self.selection(x).split_with_sizes(self.sizes, 1)
        if self.selection_norms:
            times, b, c = (norm(part) for norm, part in zip(self.selection_norms, (times, b, c), strict=True))
        return self.scan(x, self.times(times), (b, c), gate, states, self.cache + 1)


@dataclass(frozen=True, slots=True)
class MambaSpec(MixerSpec):
    """`MambaMixer`; decays is the logarithm of the negative decays.

    is_partial says whether what the selections of all ranks make is summed first.
    """

    inputs: WeightRef
    convolution: ConvolutionSpec
    selection: WeightRef
    selection_norms: tuple[NormSpec, ...]
    times: WeightRef
    decays: TensorRef
    skips: TensorRef
    time_bias: TensorRef
    output: OutputSpec
    cache: StateSpec
    is_partial: bool = False

    @override
    def build(self, kernels: LayerKernels, reader: WeightReader, first_cache: int) -> Mixer:
        rank, state_size, _ = self.selection.sizes
        selection = kernels.linear(self.selection, reader)
        return MambaMixer(
            kernels.linear(self.inputs, reader),
            self.convolution.build(kernels, reader),
            LinearWithEpilogue(selection, of_all_ranks(unchanged)) if self.is_partial else selection,
            (rank, state_size, state_size),
            tuple(norm.build_by_torch(reader) for norm in self.selection_norms),
            kernels.linear(self.times, reader),
            kernels.selective_scan(
                -reader.tensor(self.decays).exp(), reader.tensor(self.skips), reader.tensor(self.time_bias)
            ),
            self.output.build(kernels, reader),
            first_cache,
        )

    @override
    def cut(self, cut: Cut) -> Self:
        # By channels; the selection, which all of them make, is summed.
        width = self.cache.shape[0]
        if not cut.divides(width):
            return self
        part, own = (width, width), cut.run(width)
        return replace(
            self,
            inputs=cut.by_outputs(self.inputs, part, part),
            convolution=self.convolution.cut_by(cut, part),
            selection=cut.by_inputs(self.selection),
            is_partial=cut.has_sums,
            times=cut.by_outputs(self.times, part),
            decays=rows(self.decays, own),
            skips=rows(self.skips, own),
            time_bias=rows(self.time_bias, own),
            output=self.output.cut(cut),
            cache=cut.state(self.cache),
        )


@mixer_spec.register
def mamba_spec(switches: MambaSwitches, config: ModelConfig, layer: str, norm: NormSpec | None) -> MambaSpec:
    """The mixer of the layer of this name."""
    name, width, rank, size = f"{layer}.{switches.name}", switches.width, switches.rank, switches.state_size
    output = WeightRef((f"{name}.out_proj",), (config.hidden_size,), width, switches.has_bias)
    norms = tuple(
        NormSpec(TensorRef(f"{name}.{part}_layernorm.weight", (part_size,)) if switches.has_norm_weights else None, eps)
        for part, part_size in (("dt", rank), ("b", size), ("c", size))
        if (eps := switches.norm_eps) is not None
    )
    return MambaSpec(
        WeightRef((f"{name}.in_proj",), (2 * width,), config.hidden_size, switches.has_bias),
        convolution_spec(f"{name}.conv1d", width, switches.kernel, switches.has_convolution_bias, has_silu=True),
        WeightRef((f"{name}.x_proj",), (rank, size, size), width),
        norms,
        WeightRef((f"{name}.dt_proj",), (width,), rank),
        _float32(f"{name}.A_log", width, size),
        _float32(f"{name}.D", width),
        _float32(f"{name}.dt_proj.bias", width),
        output_spec(config, output, norm),
        StateSpec((width, size), torch.float32),
    )


@dataclass(frozen=True, slots=True)
class Mamba2Mixer(ProjectedMixer):
    """Mamba 2.

    Attributes:
        inputs: Makes the gate, the input of the convolution and the time steps, of these sizes.
        norm: Of the gated outputs; None for none.
    """

    inputs: Linear
    sizes: tuple[int, int, int]
    convolution: CausalConvolution
    scan: StateSpaceScan
    norm: Layer | None
    output: Linear
    cache: int

    @override
    def mix(self, normed: torch.Tensor, step: BlockStep) -> torch.Tensor:
        states = step.caches.kept
        gate, channels, times = self.inputs(normed).split_with_sizes(self.sizes, 1)
        channels = self.convolution.step(channels, states, self.cache)
        outputs = self.scan(channels, times, gate, states, self.cache + 1)
        return self.norm(outputs) if self.norm else outputs


def grouped_norm(weight: torch.Tensor, eps: float, num_groups: int) -> Layer:
    """RMSNorm of each group of the last dimension by itself; weight (size,)."""
    norm = RMSNorm(weight.view(num_groups, -1), eps)
    return lambda hidden: norm(hidden.view(len(hidden), num_groups, -1)).flatten(1)


@dataclass(frozen=True, slots=True)
class Mamba2Spec(MixerSpec):
    """`Mamba2Mixer`; decays is the logarithm of the negative decays, norm the weight of a norm in groups."""

    inputs: WeightRef
    convolution: ConvolutionSpec
    decays: TensorRef
    skips: TensorRef
    time_bias: TensorRef
    norm: TensorRef | None
    eps: float
    output: OutputSpec
    switches: Mamba2Switches
    cache: StateSpec

    @override
    def build(self, kernels: LayerKernels, reader: WeightReader, first_cache: int) -> Mixer:
        switches, norm = self.switches, None
        space = StateSpace(
            *(switches.head_dim, switches.state_size, switches.num_groups, -reader.tensor(self.decays).exp()),
            *(reader.tensor(self.skips), reader.tensor(self.time_bias), switches.scales[4]),
            *(switches.time_limits, switches.scales[0]),
        )
        if self.norm is not None:
            weight = reader.tensor(self.norm)
            is_whole = switches.num_groups == 1
            norm = kernels.norm(weight, self.eps) if is_whole else grouped_norm(weight, self.eps, switches.num_groups)
        return Mamba2Mixer(
            kernels.linear(self.inputs, reader),
            (switches.width, switches.num_channels, switches.num_heads),
            self.convolution.build(kernels, reader),
            kernels.state_space(space),
            norm,
            self.output.build(kernels, reader),
            first_cache,
        )

    @override
    def cut(self, cut: Cut) -> Self:
        # By heads, with the groups that they share; a norm is over all heads of a group, which is then not divided.
        switches, num_heads, num_groups = self.switches, self.switches.num_heads, self.switches.num_groups
        if not cut.divides_heads(num_heads, num_groups) or (self.norm and not cut.divides(num_groups)):
            return self
        width, shared = (switches.width, num_heads), (num_groups * switches.state_size, num_groups)
        own = cut.run(num_heads)
        return replace(
            self,
            inputs=cut.by_outputs(self.inputs, width, width, shared, shared, (num_heads, num_heads)),
            convolution=self.convolution.cut_by(cut, width, shared, shared),
            decays=rows(self.decays, own),
            skips=rows(self.skips, own),
            time_bias=rows(self.time_bias, own),
            norm=self.norm and rows(self.norm, *cut.runs(width)),
            output=self.output.cut(cut),
            switches=replace(switches, num_heads=own.size, num_groups=cut.run(num_groups).size),
            cache=cut.state(self.cache),
        )


@mixer_spec.register
def mamba2_spec(switches: Mamba2Switches, config: ModelConfig, layer: str, norm: NormSpec | None) -> Mamba2Spec:
    """The mixer of the layer of this name."""
    name, width, shared = f"{layer}.{switches.name}", switches.width, switches.num_groups * switches.state_size
    matrix = (f"{name}.in_proj",), (width, switches.num_channels, switches.num_heads)
    names = (f"{name}.out_proj",)
    output = WeightRef(names, (config.hidden_size,), width, switches.has_output_bias, scales=(switches.output_scale,))
    convolution = convolution_spec(
        f"{name}.conv1d", switches.num_channels, switches.kernel, switches.has_convolution_bias, has_silu=True
    )
    scales = tuple(zip((width, shared, shared), switches.scales[1:4], strict=True))
    return Mamba2Spec(
        WeightRef(*matrix, config.hidden_size, switches.has_bias),
        replace(convolution, scales=scales),
        _float32(f"{name}.A_log", switches.num_heads),
        _float32(f"{name}.D", switches.num_heads),
        _float32(f"{name}.dt_bias", switches.num_heads),
        TensorRef(f"{name}.norm.weight", (width,)) if switches.has_norm else None,
        config.rms_norm_eps,
        output_spec(config, output, norm),
        switches,
        StateSpec((switches.num_heads, switches.head_dim, switches.state_size), torch.float32),
    )


def _float32(name: str, *shape: int) -> TensorRef:
    return TensorRef(name, shape, dtype=torch.float32)


@dataclass(frozen=True, slots=True)
class ParallelMixers(Mixer):
    """Mixers that read the same hidden states; widths are the inner sizes of each."""

    mixers: tuple[Mixer, ...]
    widths: tuple[int, ...]

    @override
    def mix(self, normed: torch.Tensor, step: BlockStep) -> torch.Tensor:
        return torch.cat([mixer.mix(normed, step) for mixer in self.mixers], 1)

    @override
    def add_to(self, residual: torch.Tensor, mixed: torch.Tensor) -> None:
        for mixer, part in zip(self.mixers, mixed.split_with_sizes(self.widths, 1), strict=True):
            mixer.add_to(residual, part)


@dataclass(frozen=True, slots=True)
class ParallelMixersSpec(MixerSpec):
    """`ParallelMixers`."""

    mixers: tuple[MixerSpec, ...]
    widths: tuple[int, ...]

    @override
    def build(self, kernels: LayerKernels, reader: WeightReader, first_cache: int) -> Mixer:
        built = []
        for mixer in self.mixers:
            built.append(mixer.build(kernels, reader, first_cache))
            first_cache += len(mixer.caches)
        return ParallelMixers(tuple(built), self.widths)

    @override
    def cut(self, cut: Cut) -> Self:
        own = tuple(mixer.cut(cut) for mixer in self.mixers)
        pairs = zip(self.mixers, own, self.widths, strict=True)
        widths = tuple(width if part is whole else width // cut.num_ranks for whole, part, width in pairs)
        return replace(self, mixers=own, widths=widths)


@mixer_spec.register
def attention_and_mamba2_spec(
    switches: AttentionAndMamba2, config: ModelConfig, layer: str, output_norm: NormSpec | None
) -> ParallelMixersSpec:
    """Both mixers of the layer of this name; all layers have the same attention."""
    attention = attention_spec(config, layer, 0, output_norm)
    matrix = replace(attention.output.matrix, scales=(switches.output_scale,))
    attention = replace(attention, output=replace(attention.output, matrix=matrix))
    mamba = mamba2_spec(switches.mamba, config, layer, output_norm)
    return ParallelMixersSpec((attention, mamba), (matrix.in_features, switches.mamba.width))
