"""What a request may bring: the ids of a prompt, or what an encoder reads. Imports neither torch nor the server."""

import hashlib
import math
from array import array
from collections.abc import Collection
from itertools import groupby, pairwise
from typing import ClassVar

import msgspec

from weft.engine.wire.pictures import Picture, pictures_fault


def id_fault(name: str, token_ids: Collection[int], vocab_size: int) -> str | None:
    """What is wrong with token ids that a caller lists under this name; None when all of them exist."""
    for token_id in (min(token_ids), max(token_ids)) if token_ids else ():
        if not 0 <= token_id < vocab_size:
            return f"{name} must hold token ids from 0 to {vocab_size - 1}, got {token_id}"
    return None


class AudioShape(msgspec.Struct, array_like=True, frozen=True):
    """What an encoder of sound reads.

    Attributes:
        sample_rate: Samples of a second.
        max_samples: Most of one input.
        steps: How samples become the encoder's positions, as convolutions: (size, stride, padding) of each.
        is_padded: Whether every input is as long as the longest one, with silence behind it.
    """

    sample_rate: int
    max_samples: int
    steps: tuple[tuple[int, int, int], ...]
    is_padded: bool

    @property
    def samples_per_position(self) -> int:
        """Of the encoder's result."""
        return math.prod(stride for _, stride, _ in self.steps)

    def num_positions(self, num_samples: int) -> int:
        """Positions of the encoder's result; below 1 for too few samples."""
        length = self.max_samples if self.is_padded else num_samples
        for size, stride, padding in self.steps:
            length = (length + 2 * padding - size) // stride + 1
        return length


class InputLimits(msgspec.Struct, array_like=True, frozen=True):
    """What a model reads beside the tokens of a prompt.

    Attributes:
        longest: Most tokens, or positions, of an encoder's input; 0 for a model without an encoder.
        own: Most tokens of its decoder.
        audio, picture_token: See `EngineInfo`.
        longest_picture: Most tokens of a picture side by side, where a step computes all of them; 0: any number.
        max_attended: Most pictures of all requests at once where layers attend to them; 0 where they do not.
    """

    longest: int = 0
    own: int = 0
    audio: AudioShape | None = None
    picture_token: int | None = None
    longest_picture: int = 0
    max_attended: int = 0


NO_INPUT = InputLimits()


class TokenSpan(msgspec.Struct, array_like=True, frozen=True):
    """Tokens of a prompt that stand for something else, which the digest tells apart where the tokens are equal."""

    start: int
    num_tokens: int
    digest: bytes


class TokensInput(msgspec.Struct, tag="tokens", frozen=True, omit_defaults=True):
    """A prompt of token ids; at least one.

    Attributes:
        token_types: One for each token, such as the side of a pair; empty if all have type 0. Only encoders read it.
        spans: In their order; none reaches into another.
        pictures: What the spans stand for, each one; empty if that is something else.
        input_length: Tokens for an encoder.
        samples: Sound for an encoder.
    """

    input_length: ClassVar[int] = 0
    samples: ClassVar[bytes] = b""
    token_ids: list[int]
    token_types: list[int] = []
    spans: list[TokenSpan] = []
    pictures: list[Picture] = []

    @property
    def least(self) -> "TokensInput":
        """Another one, as short as possible."""
        return TokensInput([0])

    def num_slots(self, block_size: int) -> int:
        """Places in the cache for what an encoder reads; whole blocks."""
        return 0

    def slots(self, block_size: int) -> list[int]:
        """The ids that the cache has places for."""
        return self.token_ids

    def fault(self, vocab_size: int, limits: InputLimits = NO_INPUT) -> str | None:
        """What is wrong with it for a model of vocab_size ids; None when nothing is.

        Args:
            limits: On what the model's encoder reads.
        """
        if limits.longest:
            return "a model with an encoder needs an input"
        if not self.token_ids:
            return "the prompt must hold at least one token"
        if self.token_types and (len(self.token_types) != len(self.token_ids) or min(self.token_types) < 0):
            return f"token_types must hold a type from 0 on for each of the {len(self.token_ids)} tokens"
        for span, after in pairwise([*self.spans, TokenSpan(len(self.token_ids), 0, b"")]):
            if span.start < 0 or span.num_tokens < 1 or span.start + span.num_tokens > after.start:
                return "what stands for a part of a message that is no text must be whole"
        lengths = [span.num_tokens for span in self.spans]
        fault = pictures_fault(self.pictures, lengths, limits.picture_token, limits.max_attended)
        fault = fault or self._run_fault(limits)
        return fault or id_fault("prompt", self.token_ids, vocab_size)

    def _run_fault(self, limits: InputLimits) -> str | None:
        if not self.pictures or not limits.longest_picture:
            return None
        parts = (self.token_ids[span.start : span.start + span.num_tokens] for span in self.spans)
        runs = (len(list(run)) for part in parts for token_id, run in groupby(part) if token_id == limits.picture_token)
        if (longest := max(runs, default=0)) > limits.longest_picture:
            return f"a picture must have at most {limits.longest_picture} tokens side by side, got {longest}"
        return None


class EncoderInput(msgspec.Struct, tag="encoder", frozen=True):
    """An input of at least one token for the encoder, and the beginning of what the decoder writes about it.

    Attributes:
        input_ids: What the encoder reads.
        token_ids: What the decoder begins with; at least one.
    """

    input_ids: list[int]
    token_ids: list[int]
    token_types: ClassVar[list[int]] = []
    samples: ClassVar[bytes] = b""
    pictures: ClassVar[list[Picture]] = []

    @property
    def input_length(self) -> int:
        """See `TokensInput`."""
        return len(self.input_ids)

    @property
    def spans(self) -> list[TokenSpan]:
        """The input: what the encoder makes of a token depends on all of it."""
        digest = hashlib.blake2b(array("q", self.input_ids).tobytes(), digest_size=16).digest()
        return [TokenSpan(0, len(self.input_ids), digest)]

    @property
    def least(self) -> "EncoderInput":
        """See `TokensInput`."""
        return EncoderInput([0], [0])

    def num_slots(self, block_size: int) -> int:
        """See `TokensInput`."""
        return -(-len(self.input_ids) // block_size) * block_size

    def slots(self, block_size: int) -> list[int]:
        """See `TokensInput`; the padding repeats the last id."""
        padding = self.num_slots(block_size) - len(self.input_ids)
        return self.input_ids + self.input_ids[-1:] * padding + self.token_ids

    def fault(self, vocab_size: int, limits: InputLimits = NO_INPUT) -> str | None:
        """See `TokensInput`."""
        if limits.audio:
            return "the input of this model must be sound"
        if not 1 <= len(self.input_ids) <= limits.longest:
            return f"the input must hold from 1 to {limits.longest} tokens, got {len(self.input_ids)}"
        if not self.token_ids:
            return "the decoder must begin with at least one token"
        return id_fault("input", self.input_ids, vocab_size) or id_fault("prompt", self.token_ids, vocab_size)


class AudioInput(msgspec.Struct, tag="audio", frozen=True):
    """Sound for the encoder, and the beginning of what the decoder writes about it.

    Attributes:
        samples: 16 bits each, little endian, of one channel, at the model's rate.
        num_positions: See `AudioShape`.
        token_ids: What the decoder begins with; at least one.
    """

    samples: bytes
    num_positions: int
    token_ids: list[int]
    token_types: ClassVar[list[int]] = []
    pictures: ClassVar[list[Picture]] = []

    @property
    def input_length(self) -> int:
        """See `TokensInput`."""
        return self.num_positions

    @property
    def spans(self) -> list[TokenSpan]:
        """The input, as in `EncoderInput`."""
        return [TokenSpan(0, self.num_positions, hashlib.blake2b(self.samples, digest_size=16).digest())]

    @property
    def least(self) -> "AudioInput":
        """See `TokensInput`."""
        return self

    def num_slots(self, block_size: int) -> int:
        """See `TokensInput`."""
        return -(-self.num_positions // block_size) * block_size

    def slots(self, block_size: int) -> list[int]:
        """See `TokensInput`; sound has no ids."""
        return [0] * self.num_slots(block_size) + self.token_ids

    def fault(self, vocab_size: int, limits: InputLimits = NO_INPUT) -> str | None:
        """See `TokensInput`."""
        if limits.audio is None:
            return "this model does not hear"
        num_samples, longest = len(self.samples) // 2, limits.audio.max_samples
        if len(self.samples) % 2 or num_samples > longest or limits.audio.num_positions(num_samples) < 1:
            return (
                f"the input must be sound of at most {longest} samples and not too few, got {len(self.samples)} bytes"
            )
        if self.num_positions != (expected := limits.audio.num_positions(num_samples)):
            return f"{num_samples} samples take {expected} positions, got {self.num_positions}"
        if not self.token_ids:
            return "the decoder must begin with at least one token"
        return id_fault("prompt", self.token_ids, vocab_size)


RequestInput = TokensInput | EncoderInput | AudioInput
"""What a request may bring: a union of tagged structs. Each has the prompt's `token_ids`, `token_types` and
`spans`, and finds its own `fault`."""
