"""The front of an encoder that hears, which is whole on every rank. transformers makes the features."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from weft.engine.batch import Samples
from weft.engine.describe.specs import PartSpec
from weft.engine.families.switches import Convolution, Hearing
from weft.engine.layers.hearing import ConvolutionLayer, Features, Front
from weft.engine.weights.reader import TensorRef, WeightReader
from weft.engine.wire.errors import ModelError
from weft.engine.wire.inputs import AudioShape

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "tanh": torch.tanh,
    "glu": partial(F.glu, dim=1),
}


@dataclass(frozen=True, slots=True)
class ConvolutionSpec(PartSpec):
    """A `ConvolutionLayer` that is still to be built, in float32: most CPUs take 30 times as long for bfloat16."""

    weight: TensorRef
    bias: TensorRef | None
    norm: tuple[TensorRef, ...]
    switches: Convolution

    def build(self, reader: WeightReader) -> ConvolutionLayer:
        """Load it."""
        norm = [reader.tensor(ref) for ref in self.norm]
        return ConvolutionLayer(
            reader.tensor(self.weight),
            reader.tensor(self.bias) if self.bias else None,
            self.switches.stride,
            self.switches.padding,
            _ACTIVATIONS[self.switches.activation],
            (norm[0], norm[1]) if norm else None,
        )


@dataclass(frozen=True, slots=True)
class FrontSpec(PartSpec):
    """A `Front` that is still to be built."""

    convolutions: tuple[ConvolutionSpec, ...]
    switches: Hearing

    def build(self, reader: WeightReader, folder: Path | None, dtype: torch.dtype) -> Front:
        """Load it.

        Args:
            folder: That of the checkpoint; None for features as transformers makes them without a file.
            dtype: Of the hidden states.

        Raises:
            ModelError: preprocessor_config.json is missing, or makes other features than config.json says.
        """
        convolutions = tuple(spec.build(reader) for spec in self.convolutions)
        features = _features(self.switches, folder)
        num_inputs = self.switches.convolutions[0].inputs
        shape = self.switches.shape
        found, expected = (
            features(np.zeros(shape.max_samples, np.int16)).shape,
            (num_inputs, _num_frames(shape, convolutions)),
        )
        if found != expected:
            raise ModelError(f"preprocessor_config.json makes features of shape {(*found,)}, expected {expected}")
        return Front(features, convolutions, self.switches.scale, dtype)


def _num_frames(shape: AudioShape, convolutions: tuple[ConvolutionLayer, ...]) -> int:
    first = shape.steps[: len(shape.steps) - len(convolutions)]
    return AudioShape(shape.sample_rate, shape.max_samples, first, shape.is_padded).num_positions(shape.max_samples)


def _features(hearing: Hearing, folder: Path | None) -> Features:
    import transformers

    kind: Any = getattr(transformers, hearing.extractor)
    rate = hearing.shape.sample_rate
    try:
        extractor = kind.from_pretrained(folder) if folder else kind()
    except (OSError, ValueError, TypeError) as exc:
        raise ModelError(f"{folder}/preprocessor_config.json cannot be used: {exc}") from exc
    if extractor.sampling_rate != rate:
        raise ModelError(f"preprocessor_config.json: sampling_rate must be {rate}, got {extractor.sampling_rate}")

    def extract(samples: Samples) -> torch.Tensor:
        with np.errstate(all="ignore"):  # what is divided by a deviation of 0 in silence becomes 0 below
            made = extractor(samples.astype(np.float32) / 32768, sampling_rate=rate, return_tensors="pt")
        values: torch.Tensor = next(made[name] for name in extractor.model_input_names if name in made)[0].nan_to_num(
            0, 0, 0
        )
        if values.dim() == 1:  # the samples themselves
            return values[None]
        return values if values.size(0) == hearing.convolutions[0].inputs else values.T

    return extract


def hearing_spec(switches: Hearing) -> FrontSpec:
    """The front that these switches describe."""
    return FrontSpec(tuple(map(_convolution_spec, switches.convolutions)), switches)


def _convolution_spec(step: Convolution) -> ConvolutionSpec:
    num_made = step.outputs // 2 if step.activation == "glu" else step.outputs
    ref = partial(TensorRef, dtype=torch.float32)
    return ConvolutionSpec(
        ref(f"{step.name}.weight", (step.outputs, step.inputs, step.size)),
        ref(f"{step.name}.bias", (step.outputs,)) if step.has_bias else None,
        tuple(ref(f"{step.norm}.{end}", (num_made,)) for end in ("weight", "bias")) if step.norm else (),
        step,
    )
