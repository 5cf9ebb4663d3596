"""Rotary position embedding (Su et al., 2021): inverse frequencies, their scalings, table and rotation.

Pairs are (i, i + head_dim / 2), as in most Hugging Face checkpoints; `head_order` says how the rows of other heads are
put into this form when they are loaded, which changes no score. The table is computed once, in float32, up to the
longest context. Each step gathers its rows once; layers only multiply.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch


class RopeScaling(Protocol):
    """Changes the inverse frequencies for contexts longer than those of the first training."""

    @property
    def attention_factor(self) -> float:
        """Multiplier of cosine and sine."""

    def scale(self, frequencies: torch.Tensor, theta: float) -> torch.Tensor:
        """Scaled inverse frequencies, (head_dim / 2,) float32."""


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Divides positions by `factor` (position interpolation: Chen et al., 2023)."""

    factor: float
    attention_factor: float = 1.0

    def scale(self, frequencies: torch.Tensor, theta: float) -> torch.Tensor:
        """Divide every frequency."""
        return frequencies / self.factor


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Divides low frequencies by `factor`, keeps high ones, and interpolates between them (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int
    attention_factor: float = 1.0

    def scale(self, frequencies: torch.Tensor, theta: float) -> torch.Tensor:
        """Blend by the number of turns within the original context."""
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        smooth = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return (1 - smooth) * frequencies / self.factor + smooth * frequencies


@dataclass(frozen=True, slots=True)
class LongScaling:
    """Divides every frequency by a number of its own (LongRoPE: Ding et al., 2024).

    A request that outgrows the original context has the long factors at all its positions. See `RotaryTable`.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_position_embeddings: int
    attention_factor: float

    def scale(self, frequencies: torch.Tensor, theta: float) -> torch.Tensor:
        """Divide each by its short factor."""
        return frequencies / torch.tensor(self.short_factors)

    def scale_beyond(self, frequencies: torch.Tensor) -> torch.Tensor:
        """Divide each by its long factor."""
        return frequencies / torch.tensor(self.long_factors)


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN: Peng et al., 2023. `attention_factor` is resolved when the checkpoint is read."""

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def scale(self, frequencies: torch.Tensor, theta: float) -> torch.Tensor:
        """Keep dimensions with at least beta_fast turns; interpolate those with at most beta_slow turns."""
        half = len(frequencies)
        low, high = (self._dimension(turns, theta, 2 * half) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * half - 1)
        if low == high:
            high += 0.001
        ramp = ((torch.arange(half, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
        return frequencies / self.factor * ramp + frequencies * (1 - ramp)

    def _dimension(self, turns: float, theta: float, head_dim: int) -> float:
        """The dimension whose frequency makes this many turns within the original context."""
        wavelength = self.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(theta))


@dataclass(frozen=True, slots=True)
class ProportionalScaling:
    """Turns the first `share` of the pairs of a whole head alone (Gemma 4)."""

    share: float
    factor: float
    attention_factor: float = 1.0

    def scale(self, frequencies: torch.Tensor, theta: float) -> torch.Tensor:
        """Set the others to 0."""
        num_turned = int(self.share * len(frequencies))
        return torch.cat((frequencies[:num_turned] / self.factor, torch.zeros(len(frequencies) - num_turned)))


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Base of the frequencies, their scaling, and how many values of a head are rotated.

    Attributes:
        scaling: None means no scaling.
        rotary_dim: The first so many values of a head are rotated; None means all. 0 rotates nothing.
        head_dim: Values of a head; None means those that the model names for all layers.
        axes: For each frequency, which of a token's three positions it turns by; empty where there is one.
    """

    theta: float
    scaling: RopeScaling | None = None
    rotary_dim: int | None = None
    head_dim: int | None = None
    axes: tuple[int, ...] = ()


NO_ROPE = RopeConfig(1.0, rotary_dim=0)
"""Leaves heads as they are, for layers whose attention knows no positions."""


def head_order(head_dim: int, rotary_dim: int, is_interleaved: bool) -> tuple[int, ...]:
    """For each value of a head in this form, its place in the checkpoint; empty if they are the same.

    Args:
        is_interleaved: The checkpoint rotates pairs (2 i, 2 i + 1), not (i, i + rotary_dim / 2).
    """
    rotated = range(rotary_dim)
    half = rotary_dim // 2
    firsts, seconds = (rotated[::2], rotated[1::2]) if is_interleaved else (rotated[:half], rotated[half:])
    middle = rotary_dim + head_dim // 2 - half
    order = (*firsts, *range(rotary_dim, middle), *seconds, *range(middle, head_dim))
    return () if order == tuple(range(head_dim)) else order


class PositionTable(Protocol):
    """What layers need to know of every position, computed before the first step."""

    def gather(self, positions: torch.Tensor) -> torch.Tensor:
        """(num_tokens, ...) at positions (num_tokens,), or (3, num_tokens) in a model with axes."""


class RotaryTable(PositionTable):
    """Cosine and sine of every position below max_model_len, in the model's dtype.

    With a short context, rows below it are for requests that are no longer than that. Behind them come the rows of
    requests that are longer: position p has row short_context + p.
    """

    def __init__(
        self,
        rope: RopeConfig,
        head_dim: int,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
        short_context: int = 0,
    ) -> None:
        """Compute the table on the CPU in float32, then move it: (num_rows, 2, 1, head_dim); 1 row for no turn.

        Args:
            short_context: See `ModelFacts`; 0 where frequencies are the same for all lengths.
        """
        rotary_dim = head_dim if rope.rotary_dim is None else rope.rotary_dim
        self._turns = rotary_dim > 0
        positions = torch.arange(max_model_len if self._turns else 1, dtype=torch.float32)
        frequencies = 1.0 / (rope.theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / max(rotary_dim, 1)))
        factor, beyond = 1.0, frequencies
        if rope.scaling is not None:
            scaled = rope.scaling.scale(frequencies, rope.theta)
            beyond = rope.scaling.scale_beyond(frequencies) if isinstance(rope.scaling, LongScaling) else scaled
            frequencies, factor = scaled, rope.scaling.attention_factor
        angles = torch.outer(positions, frequencies)
        if self._turns and 0 < short_context < max_model_len:
            angles = torch.cat((angles[:short_context], torch.outer(positions, beyond)))
        cos, sin = angles.cos() * factor, angles.sin() * factor
        others = (0, (head_dim - rotary_dim) // 2)  # a turn by nothing leaves a value as it is
        cos, sin = torch.nn.functional.pad(cos, others, value=1.0), torch.nn.functional.pad(sin, others)
        # Rotating by half a head negates the first half; the table holds that sign.
        rows = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), dim=1)
        self._rows = rows.unsqueeze(2).to(device, dtype)
        half = torch.zeros(head_dim // 2, dtype=torch.int64)
        half[: len(rope.axes)] = torch.tensor(rope.axes, dtype=torch.int64)
        self._axes = torch.cat((half, half)).to(device)  # (head_dim,)

    def gather(self, positions: torch.Tensor) -> torch.Tensor:
        """Cosine and signed sine at positions (num_tokens,): (num_tokens, 2, 1, head_dim).

        At positions (3, num_tokens) each frequency is at the one on its axis (M-RoPE: Wang et al., 2024).
        """
        positions = positions if self._turns else torch.zeros_like(positions)
        if positions.dim() == 1:
            return self._rows.index_select(0, positions)
        rows = self._rows[positions]  # (3, num_tokens, 2, 1, head_dim)
        return rows.gather(0, self._axes.expand(1, *rows.shape[1:])).squeeze(0)


def rotate(heads: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Rotate heads (num_tokens, num_heads, head_dim) by the angles from `RotaryTable.gather`."""
    cos, sin = rotation.unbind(1)  # (num_tokens, 1, head_dim) each
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    return (heads * cos).addcmul_(swapped, sin)
