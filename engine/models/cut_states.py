"""Cuts mixers that keep states for a rank, by heads or channels; see `sharding.py`.

A mixer that cannot be cut is returned as it is.
"""

from dataclasses import replace

from weft.engine.cache.specs import StateSpec
from weft.engine.describe.specs import MixerSpec
from weft.engine.models.cut import Cut, rows
from weft.engine.models.linear_attention import (
    ConvolutionSpec,
    GatedDeltaSpec,
    GatedRecurrenceSpec,
    ShortConvolutionSpec,
)
from weft.engine.models.mamba import Mamba2Spec, MambaSpec


def gated_delta(cut: Cut, mixer: GatedDeltaSpec) -> MixerSpec:
    """Linear attention by heads, with the keys that they share."""
    sizes = mixer.sizes
    if not cut.divides_heads(sizes.num_heads, sizes.num_key_heads):
        return mixer
    keys, values, heads = (
        (sizes.keys, sizes.num_key_heads),
        (sizes.values, sizes.num_heads),
        (sizes.num_heads, sizes.num_heads),
    )
    own, own_keys = cut.run(sizes.num_heads), cut.run(sizes.num_key_heads)
    sizes = replace(sizes, num_heads=own.size, num_key_heads=own_keys.size)
    qkv = (keys, keys, values)
    parts = ((*qkv, values, heads, heads),) if len(mixer.projections) == 1 else ((*qkv, values), (heads, heads))
    splits = (2 * sizes.keys + sizes.values, sizes.values), (own.size, own.size)
    pairs = zip(mixer.projections, parts, strict=True)
    return replace(
        mixer,
        projections=tuple(cut.by_outputs(matrix, *of_matrix) for matrix, of_matrix in pairs),
        splits=splits if len(parts) > 1 else ((*splits[0], *splits[1]),),
        convolution=_convolution(cut, mixer.convolution, *qkv),
        decay_log=rows(mixer.decay_log, own),
        decay_bias=rows(mixer.decay_bias, own),
        output=cut.output(mixer.output),
        sizes=sizes,
        state=_state(cut, mixer.state),
    )


def short_convolution(cut: Cut, mixer: ShortConvolutionSpec) -> MixerSpec:
    """By channels."""
    channels = mixer.convolution.cache.shape[0]
    if not cut.divides(channels):
        return mixer
    part = channels, channels
    return replace(
        mixer,
        inputs=cut.by_outputs(mixer.inputs, part, part, part),
        convolution=_convolution(cut, mixer.convolution, part),
        output=cut.output(mixer.output),
    )


def gated_recurrence(cut: Cut, mixer: GatedRecurrenceSpec) -> MixerSpec:
    """By the blocks of its gates."""
    (width,), num_blocks = mixer.state.shape, mixer.gate_weights[0].shape[0]
    if not cut.divides(num_blocks):
        return mixer
    part, blocks = (width, width), cut.run(num_blocks)
    return replace(
        mixer,
        inputs=cut.by_outputs(mixer.inputs, part, part),
        convolution=_convolution(cut, mixer.convolution, part),
        gate_weights=tuple(rows(gate, blocks) for gate in mixer.gate_weights),
        gate_biases=tuple(rows(gate, blocks) for gate in mixer.gate_biases),
        rate=rows(mixer.rate, cut.run(width)),
        output=cut.output(mixer.output),
        state=_state(cut, mixer.state),
    )


def mamba(cut: Cut, mixer: MambaSpec) -> MixerSpec:
    """By channels; the selection, which all of them make, is summed."""
    width = mixer.cache.shape[0]
    if not cut.divides(width):
        return mixer
    part, own = (width, width), cut.run(width)
    return replace(
        mixer,
        inputs=cut.by_outputs(mixer.inputs, part, part),
        convolution=_convolution(cut, mixer.convolution, part),
        selection=cut.by_inputs(mixer.selection),
        is_partial=cut.has_sums,
        times=cut.by_outputs(mixer.times, part),
        decays=rows(mixer.decays, own),
        skips=rows(mixer.skips, own),
        time_bias=rows(mixer.time_bias, own),
        output=cut.output(mixer.output),
        cache=_state(cut, mixer.cache),
    )


def mamba2(cut: Cut, mixer: Mamba2Spec) -> MixerSpec:
    """By heads, with the groups that they share; a norm is over all heads of a group, which is then not divided."""
    switches, num_heads, num_groups = mixer.switches, mixer.switches.num_heads, mixer.switches.num_groups
    if not cut.divides_heads(num_heads, num_groups) or (mixer.norm and not cut.divides(num_groups)):
        return mixer
    width, shared = (switches.width, num_heads), (num_groups * switches.state_size, num_groups)
    own = cut.run(num_heads)
    return replace(
        mixer,
        inputs=cut.by_outputs(mixer.inputs, width, width, shared, shared, (num_heads, num_heads)),
        convolution=_convolution(cut, mixer.convolution, width, shared, shared),
        decays=rows(mixer.decays, own),
        skips=rows(mixer.skips, own),
        time_bias=rows(mixer.time_bias, own),
        norm=mixer.norm and rows(mixer.norm, *cut.runs(width)),
        output=cut.output(mixer.output),
        switches=replace(switches, num_heads=own.size, num_groups=cut.run(num_groups).size),
        cache=_state(cut, mixer.cache),
    )


def _convolution(cut: Cut, convolution: ConvolutionSpec, *parts: tuple[int, int]) -> ConvolutionSpec:
    runs, (_, kernel) = cut.runs(*parts), convolution.cache.shape
    factors = [factor for _, factor in convolution.scales]
    return replace(
        convolution,
        weight=rows(convolution.weight, *runs),
        bias=convolution.bias and rows(convolution.bias, *runs),
        cache=replace(convolution.cache, shape=(sum(run.size for run in runs), kernel)),
        scales=tuple((run.size, factor) for run, factor in zip(runs, factors, strict=False)),
    )


def _state(cut: Cut, state: StateSpec) -> StateSpec:
    first, *others = state.shape
    return replace(state, shape=(first // cut.num_ranks, *others))
