"""Describes linear attention, short convolutions, Griffin's recurrence and gated attention, and builds their mixers.

`gated_recurrence.py` has the mixers of linear attention and of Griffin. The mixers of short convolutions and of gated
attention stand here, each above its description.
"""

from dataclasses import dataclass, replace
from typing import Self

import torch
from typing_extensions import override

from weft.engine.cache.specs import StateSpec
from weft.engine.describe.config import ModelConfig
from weft.engine.describe.cut import Cut, rows
from weft.engine.describe.specs import AttentionSpec, MixerSpec, NormSpec, OutputSpec, PartSpec
from weft.engine.describe.tensor_names import attention_spec, mixer_spec, output_spec
from weft.engine.families import attention as attention_switches
from weft.engine.layers.block import Attention, BlockStep, Linear, Mixer, ProjectedMixer
from weft.engine.layers.feed_forward import ACTIVATIONS
from weft.engine.layers.kernels import LayerKernels
from weft.engine.layers.recurrence import CausalConvolution
from weft.engine.parts.gated_recurrence import DeltaSizes, GatedDelta, GatedRecurrence, SplitProjections, recurrent_unit
from weft.engine.weights.reader import RowOrder, TensorRef, WeightReader, WeightRef


@dataclass(frozen=True, slots=True)
class ConvolutionSpec(PartSpec):
    """`CausalConvolution`; weight (channels, 1, kernel), as checkpoints have it.

    Attributes:
        scales: Number of channels and factor on their inputs, one range of channels after the other; empty for 1.
    """

    weight: TensorRef
    bias: TensorRef | None
    cache: StateSpec
    has_silu: bool
    scales: tuple[tuple[int, float], ...] = ()

    def build(self, kernels: LayerKernels, reader: WeightReader) -> CausalConvolution:
        """Load it."""
        weight = reader.tensor(self.weight).squeeze(1)
        if self.scales:  # the state keeps inputs as they are
            weight *= torch.cat([weight.new_full((size, 1), factor) for size, factor in self.scales])
        return kernels.convolution(weight, reader.tensor(self.bias) if self.bias else None, has_silu=self.has_silu)

    def cut_by(self, cut: Cut, *parts: tuple[int, int]) -> "ConvolutionSpec":
        """A rank's part of each of several parts of the channels, which follow each other: their sizes and heads."""
        runs, (_, kernel) = cut.runs(*parts), self.cache.shape
        factors = [factor for _, factor in self.scales]
        return replace(
            self,
            weight=rows(self.weight, *runs),
            bias=self.bias and rows(self.bias, *runs),
            cache=replace(self.cache, shape=(sum(run.size for run in runs), kernel)),
            scales=tuple((run.size, factor) for run, factor in zip(runs, factors, strict=False)),
        )


def convolution_spec(name: str, channels: int, kernel: int, has_bias: bool, has_silu: bool) -> ConvolutionSpec:
    """A depthwise convolution of this name; weights and states are float32, whatever the model's dtype."""
    return ConvolutionSpec(
        TensorRef(f"{name}.weight", (channels, 1, kernel), dtype=torch.float32),
        TensorRef(f"{name}.bias", (channels,), dtype=torch.float32) if has_bias else None,
        StateSpec((channels, kernel - 1), torch.float32),
        has_silu,
    )


@dataclass(frozen=True, slots=True)
class GatedDeltaSpec(MixerSpec):
    """`GatedDelta`.

    Attributes:
        projections: See `SplitProjections`.
        splits: Its sizes.
        decay_log: Logarithm of the decay rate of each head.
        decay_bias: Of all decays.
    """

    projections: tuple[WeightRef, ...]
    splits: tuple[tuple[int, ...], ...]
    convolution: ConvolutionSpec
    decay_log: TensorRef
    decay_bias: TensorRef
    norm: TensorRef
    eps: float
    output: OutputSpec
    sizes: DeltaSizes
    state: StateSpec

    @override
    def build(self, kernels: LayerKernels, reader: WeightReader, first_cache: int) -> Mixer:
        projections = SplitProjections(tuple(kernels.linear(ref, reader) for ref in self.projections), self.splits)
        return GatedDelta(
            projections,
            self.convolution.build(kernels, reader),
            kernels.delta_rule(),
            self.output.build(kernels, reader),
            self.sizes,
            -reader.tensor(self.decay_log).exp().view(-1, 1),
            reader.tensor(self.decay_bias),
            reader.tensor(self.norm),
            self.eps,
            first_cache,
        )

    @override
    def cut(self, cut: Cut) -> Self:
        # Linear attention by heads, with the keys that they share.
        sizes = self.sizes
        if not cut.divides_heads(sizes.num_heads, sizes.num_key_heads):
            return self
        keys, values, heads = (
            (sizes.keys, sizes.num_key_heads),
            (sizes.values, sizes.num_heads),
            (sizes.num_heads, sizes.num_heads),
        )
        own, own_keys = cut.run(sizes.num_heads), cut.run(sizes.num_key_heads)
        sizes = replace(sizes, num_heads=own.size, num_key_heads=own_keys.size)
        qkv = (keys, keys, values)
        parts = ((*qkv, values, heads, heads),) if len(self.projections) == 1 else ((*qkv, values), (heads, heads))
        splits = (2 * sizes.keys + sizes.values, sizes.values), (own.size, own.size)
        pairs = zip(self.projections, parts, strict=True)
        return replace(
            self,
            projections=tuple(cut.by_outputs(matrix, *of_matrix) for matrix, of_matrix in pairs),
            splits=splits if len(parts) > 1 else ((*splits[0], *splits[1]),),
            convolution=self.convolution.cut_by(cut, *qkv),
            decay_log=rows(self.decay_log, own),
            decay_bias=rows(self.decay_bias, own),
            output=self.output.cut(cut),
            sizes=sizes,
            state=cut.state(self.state),
        )


@mixer_spec.register
def gated_delta_spec(
    switches: attention_switches.DeltaSwitches, config: ModelConfig, layer: str, output_norm: NormSpec | None
) -> GatedDeltaSpec:
    """Linear attention of the layer of this name."""
    prefix = f"{layer}.{switches.prefix}"
    sizes = DeltaSizes(switches.num_key_heads, switches.num_heads, switches.key_dim, switches.value_dim)
    channels = 2 * sizes.keys + sizes.values
    projections, splits = _projections(switches, sizes, config.hidden_size, prefix)
    output = WeightRef((f"{prefix}.{switches.output}",), (config.hidden_size,), sizes.values)
    return GatedDeltaSpec(
        projections=projections,
        splits=splits,
        convolution=convolution_spec(f"{prefix}.conv1d", channels, switches.kernel, has_bias=False, has_silu=True),
        decay_log=TensorRef(f"{prefix}.A_log", (sizes.num_heads,), dtype=torch.float32),
        decay_bias=TensorRef(f"{prefix}.dt_bias", (sizes.num_heads,), dtype=torch.float32),
        norm=TensorRef(f"{prefix}.{switches.norm}.weight", (sizes.value_dim,)),
        eps=config.rms_norm_eps,
        output=output_spec(config, output, output_norm),
        sizes=sizes,
        state=StateSpec((sizes.num_heads, sizes.key_dim, sizes.value_dim), torch.float32),
    )


def _projections(
    switches: attention_switches.DeltaSwitches, sizes: DeltaSizes, hidden: int, prefix: str
) -> tuple[tuple[WeightRef, ...], tuple[tuple[int, ...], ...]]:
    """The matrices, and for each the sizes of what it makes."""
    names = tuple(f"{prefix}.{name}" for name in switches.projections)
    keys, values, heads = sizes.keys, sizes.values, sizes.num_heads
    if not switches.is_grouped:
        apart = (keys, keys, values, values, heads, heads)
        split = (2 * keys + values, values, heads, heads)
        return (WeightRef(names, apart if len(names) == len(apart) else split, hidden),), (split,)
    groups, shared = sizes.num_key_heads, values // sizes.num_key_heads
    order = RowOrder(groups, (sizes.key_dim, sizes.key_dim, shared, shared))
    first = WeightRef(names[:1], (keys, keys, values, values), hidden, order=order)
    second = WeightRef(names[1:], (heads, heads), hidden, order=RowOrder(groups, (heads // groups, heads // groups)))
    return (first, second), ((2 * keys + values, values), (heads, heads))


@dataclass(frozen=True, slots=True)
class ShortConvolution(ProjectedMixer):
    """A short convolution between two gates (LFM2: Liquid AI, 2025). Gates are products without an activation.

    Attributes:
        inputs: (num_tokens, hidden_size) -> first gate, second gate, values, each (num_tokens, channels).
        cache: Index of the convolution's cache in the model.
    """

    inputs: Linear
    convolution: CausalConvolution
    output: Linear
    cache: int

    @override
    def mix(self, normed: torch.Tensor, step: BlockStep) -> torch.Tensor:
        states = step.caches.kept
        before, after, values = self.inputs(normed).chunk(3, 1)
        return self.convolution.step(before * values, states, self.cache).mul_(after)


@dataclass(frozen=True, slots=True)
class ShortConvolutionSpec(MixerSpec):
    """`ShortConvolution`."""

    inputs: WeightRef
    convolution: ConvolutionSpec
    output: OutputSpec

    @override
    def build(self, kernels: LayerKernels, reader: WeightReader, first_cache: int) -> Mixer:
        inputs = kernels.linear(self.inputs, reader)
        convolution = self.convolution.build(kernels, reader)
        return ShortConvolution(inputs, convolution, self.output.build(kernels, reader), first_cache)

    @override
    def cut(self, cut: Cut) -> Self:
        # By channels.
        channels = self.convolution.cache.shape[0]
        if not cut.divides(channels):
            return self
        part = channels, channels
        inputs = cut.by_outputs(self.inputs, part, part, part)
        return replace(self, inputs=inputs, convolution=self.convolution.cut_by(cut, part), output=self.output.cut(cut))


@mixer_spec.register
def short_convolution_spec(
    switches: attention_switches.ShortConvolutionSwitches, config: ModelConfig, layer: str, output_norm: NormSpec | None
) -> ShortConvolutionSpec:
    """The convolution of the layer of this name."""
    prefix = f"{layer}.conv"
    hidden, has_bias = config.hidden_size, switches.has_bias
    output = WeightRef((f"{prefix}.out_proj",), (hidden,), hidden, has_bias)
    return ShortConvolutionSpec(
        WeightRef((f"{prefix}.in_proj",), (hidden,) * 3, hidden, has_bias),
        convolution_spec(f"{prefix}.conv", hidden, switches.kernel, has_bias, has_silu=False),
        output_spec(config, output, output_norm),
    )


@dataclass(frozen=True, slots=True)
class GatedRecurrenceSpec(MixerSpec):
    """`GatedRecurrence`; gates are those of inputs and of decays."""

    inputs: WeightRef
    convolution: ConvolutionSpec
    gate_weights: tuple[TensorRef, ...]
    gate_biases: tuple[TensorRef, ...]
    rate: TensorRef
    activation: str
    output: OutputSpec
    state: StateSpec

    @override
    def build(self, kernels: LayerKernels, reader: WeightReader, first_cache: int) -> Mixer:
        weights, biases = (tuple(map(reader.tensor, refs)) for refs in (self.gate_weights, self.gate_biases))
        return GatedRecurrence(
            kernels.linear(self.inputs, reader),
            self.convolution.build(kernels, reader),
            recurrent_unit(weights, biases, reader.tensor(self.rate)),
            ACTIVATIONS[self.activation],
            self.output.build(kernels, reader),
            first_cache,
        )

    @override
    def cut(self, cut: Cut) -> Self:
        # By the blocks of its gates.
        (width,), num_blocks = self.state.shape, self.gate_weights[0].shape[0]
        if not cut.divides(num_blocks):
            return self
        part, blocks = (width, width), cut.run(num_blocks)
        return replace(
            self,
            inputs=cut.by_outputs(self.inputs, part, part),
            convolution=self.convolution.cut_by(cut, part),
            gate_weights=tuple(rows(gate, blocks) for gate in self.gate_weights),
            gate_biases=tuple(rows(gate, blocks) for gate in self.gate_biases),
            rate=rows(self.rate, cut.run(width)),
            output=self.output.cut(cut),
            state=cut.state(self.state),
        )


@mixer_spec.register
def gated_recurrence_spec(
    switches: attention_switches.GatedRecurrenceSwitches, config: ModelConfig, layer: str, output_norm: NormSpec | None
) -> GatedRecurrenceSpec:
    """Griffin's recurrence in the layer of this name."""
    prefix = f"{layer}.temporal_block"
    hidden, width, num_blocks = config.hidden_size, switches.width, config.num_heads
    size, unit = width // num_blocks, f"{prefix}.rg_lru"
    names = (f"{prefix}.linear_x", f"{prefix}.linear_y")
    gates = (f"{unit}.input_gate", f"{unit}.recurrent_gate")
    output = WeightRef((f"{prefix}.linear_out",), (hidden,), width, has_bias=True)
    return GatedRecurrenceSpec(
        inputs=WeightRef(names, (width, width), hidden, has_bias=True),
        convolution=convolution_spec(f"{prefix}.conv_1d", width, switches.kernel, has_bias=True, has_silu=False),
        gate_weights=tuple(TensorRef(f"{gate}_weight", (num_blocks, size, size)) for gate in gates),
        gate_biases=tuple(TensorRef(f"{gate}_bias", (num_blocks, size)) for gate in gates),
        rate=TensorRef(f"{unit}.recurrent_param", (width,), dtype=torch.float32),
        activation=config.activation,
        output=output_spec(config, output, output_norm),
        state=StateSpec((width,), torch.float32),
    )


@dataclass(frozen=True, slots=True)
class GatedAttention(Mixer):
    """Softmax attention whose outputs are multiplied by a sigmoid gate of the layer's input (Qiu et al., 2025).

    The `qkv` of the attention makes the gate, too, behind queries, keys and values.

    Attributes:
        num_heads: Heads of queries.
        gate_size: Values of the gate of a token.
    """

    attention: Attention
    num_heads: int
    gate_size: int

    @override
    def mix(self, normed: torch.Tensor, step: BlockStep) -> torch.Tensor:
        projected = self.attention.qkv(normed)
        qkv, gate = projected.split_with_sizes((projected.size(1) - self.gate_size, self.gate_size), 1)
        outputs = self.attention.attend(qkv.contiguous(), step)
        by_head = outputs.view(-1, self.num_heads, self.attention.head_dim)
        by_head *= gate.sigmoid().view(-1, self.num_heads, self.gate_size // self.num_heads)
        return outputs

    @override
    def add_to(self, residual: torch.Tensor, mixed: torch.Tensor) -> None:
        self.attention.add_to(residual, mixed)


@dataclass(frozen=True, slots=True)
class GatedAttentionSpec(MixerSpec):
    """`GatedAttention`; the matrix of attention makes the gate, too."""

    attention: AttentionSpec
    gate_size: int

    @override
    def build(self, kernels: LayerKernels, reader: WeightReader, first_cache: int) -> Mixer:
        attention = self.attention.build(kernels, reader, first_cache)
        return GatedAttention(attention, self.attention.num_heads, self.gate_size)

    @override
    def cut(self, cut: Cut) -> Self:
        attention = self.attention.cut(cut, self.gate_size)
        if attention is self.attention:
            return self
        return replace(self, attention=attention, gate_size=self.gate_size // cut.num_ranks)


@mixer_spec.register
def gated_attention_spec(
    switches: attention_switches.GatedAttentionSwitches, config: ModelConfig, layer: str, output_norm: NormSpec | None
) -> GatedAttentionSpec:
    """Attention of the layer of this name."""
    spec = attention_spec(config, layer, switches.index, output_norm)
    qkv = spec.qkv
    queries, keys, values = qkv.sizes
    order = replace(qkv.order or RowOrder(), num_groups=config.num_heads, parts=(config.head_dim, config.head_dim))
    qkv = replace(qkv, sizes=(2 * queries, keys, values), order=order)
    return GatedAttentionSpec(replace(spec, qkv=qkv), queries)
