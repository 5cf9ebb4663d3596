"""The model around an encoder and a decoder that reads it, and the two kinds of tokens in a step of it.

A request begins with its input, and its decoder's tokens follow (`PagedKV.num_input_tokens`). The encoder reads whole
inputs, each in one step, and keeps nothing. Every layer of the decoder then makes keys and values of its result and
writes them where the tokens of the input have their places in the cache. So later steps read them from there, and what
shares, moves or evicts blocks knows no encoder.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from typing_extensions import override

from weft.engine.batch import Samples
from weft.engine.cache.specs import CacheSpec
from weft.engine.layers.block import AttentionStep, Decoder, LoadedModel, StepCaches
from weft.engine.layers.hearing import Front

SCORES = "scores of aligned heads"
"""In `StepCaches.passed`: those of each layer that has such heads, in a step that aligns."""


@runtime_checkable
class CrossStep(Protocol):
    """Reads and writes, in one step, what layers keep of the inputs."""

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write those of the inputs that this step reads, (num_input_tokens, num_kv_heads, head_dim)."""

    def read(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """Attend from the decoder's tokens, (num_tokens, num_heads, head_dim), each to all of its request's input."""


@dataclass(frozen=True, slots=True)
class EncoderStep:
    """The two kinds of tokens in one step.

    Attributes:
        inputs: (num_input_tokens,) indices of the tokens that the encoder reads; padding is left out.
        input_positions: (num_input_tokens,)
        texts: Makes attention within the inputs, for what the encoder's caches would be.
        own: (num_own_tokens,) indices of the decoder's tokens.
        own_positions: (num_own_tokens,) where they are behind the inputs.
        places: (num_tokens,) where a token of the step is among the decoder's.
        cross: What layers keep of the inputs.
        sounds: The inputs, where these are not tokens.
        rows_of: For each input that the encoder reads, the decoder's tokens that belong to it, (n,) indices among them;
            empty in a step that aligns nothing.
    """

    inputs: torch.Tensor
    input_positions: torch.Tensor
    texts: Callable[[tuple[CacheSpec, ...]], AttentionStep]
    own: torch.Tensor
    own_positions: torch.Tensor
    places: torch.Tensor
    cross: CrossStep
    sounds: tuple[Samples, ...] = ()
    rows_of: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True, slots=True)
class InputCaches(StepCaches):
    """The caches of one step of a model with an encoder."""

    encoder: EncoderStep = field(kw_only=True)


def distance_buckets(
    distances: torch.Tensor, num_buckets: int, max_distance: int, is_bidirectional: bool
) -> torch.Tensor:
    """The bucket of each distance, position of the key - that of the query (Raffel et al., 2020, section 2.1).

    Half of the buckets hold one distance each, the others grow with its logarithm. A decoder has no keys behind a
    query; an encoder has half of the buckets for these.
    """
    behind = torch.zeros_like(distances)
    if is_bidirectional:
        num_buckets //= 2
        behind = (distances > 0) * num_buckets
        distances = distances.abs()
    else:
        distances = -distances.clamp(max=0)
    num_exact = num_buckets // 2
    ratio = torch.log(distances.clamp(min=1).float() / num_exact) / math.log(max_distance / num_exact)
    growing = (num_exact + (ratio * (num_buckets - num_exact)).long()).clamp(max=num_buckets - 1)
    return behind + torch.where(distances < num_exact, distances, growing)


def sine_table(num_positions: int, size: int, first: int, is_of_fairseq: bool) -> torch.Tensor:
    """(num_positions, size) float32: sines, then cosines, of waves that grow longer; see `Sinusoid`."""
    half = size // 2
    steps = torch.arange(half, dtype=torch.float64) / ((half - 1) if is_of_fairseq else half)
    angles = torch.arange(first, first + num_positions)[:, None] * 10_000.0**-steps
    return torch.cat((angles.sin(), angles.cos()), 1).float()


@dataclass(frozen=True, slots=True)
class EncoderDecoder(LoadedModel):
    """A model of two halves. The encoder has no head and no caches; a front takes the place of its embedding.

    In a step that aligns, the scores of the aligned heads stand behind the hidden states, of the tokens whose input is
    read in that step.
    """

    encoder: Decoder
    decoder: Decoder
    hidden_size: int
    dtype: torch.dtype
    front: Front | None = None

    @property
    @override
    def cache_specs(self) -> tuple[CacheSpec, ...]:
        return self.decoder.cache_specs

    @property
    @override
    def weights_bytes(self) -> int:
        return self.decoder.weights_bytes

    @override
    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, caches: StepCaches, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert isinstance(caches, InputCaches)
        step = caches.encoder
        if len(step.inputs):
            hidden = self.front(step.sounds) if self.front else self.encoder.embedding(token_ids[step.inputs])
            texts = StepCaches(step.texts(self.encoder.cache_specs))
            encoded = self.encoder.forward_embedded(hidden, step.input_positions, texts)
            caches.passed["encoded"] = (encoded,)
            caches.passed[SCORES] = ()
        own_rows = None if rows is None else step.places[rows]
        hidden = self.decoder.forward(token_ids[step.own], step.own_positions, caches, own_rows)
        if rows is not None or len(step.own) == len(token_ids):
            return hidden
        if scores := caches.passed.get(SCORES):
            hidden = torch.cat((hidden.float(), *scores), 1)
        whole = hidden.new_zeros(len(token_ids), hidden.size(1))  # who names no rows finds tokens by their indices
        whole[step.own] = hidden
        return whole

    @override
    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.decoder.compute_logits(hidden_states[:, : self.hidden_size].to(self.dtype))
