"""What one window of sound gave, and how it is divided by the times in it: pure functions over token ids.

As transformers does it (`generation_whisper._retrieve_segment`), which follows OpenAI's `transcribe.py`.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from weft.engine.wire.inputs import AudioShape
from weft.engine.wire.messages import TokenLogprobs
from weft.server.speech.words import Word


@dataclass(frozen=True, slots=True)
class Facts:
    """What OpenAI's verbose_json says of a window.

    Attributes:
        seek: Where it begins, in hundredths of a second.
    """

    seek: int
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float = 0.0


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of the text. Times are in seconds.

    Attributes:
        tokens: With the times around it.
        spoken: The tokens of its text, with their log-probabilities.
        window: The facts of its window.
        words: Empty unless they are asked for.
    """

    start: float
    end: float
    text: str
    tokens: Sequence[int]
    spoken: Sequence[tuple[int, float]]
    window: Facts
    words: Sequence[Word] = ()


@dataclass(frozen=True, slots=True)
class Frames:
    """The units of a model's time.

    Attributes:
        hop: Samples of a frame.
        stride: Frames of a position, which is what a time counts.
        most: Frames of a window.
        rate: Samples of a second.
    """

    hop: int
    stride: int
    most: int
    rate: int

    @classmethod
    def of(cls, shape: AudioShape) -> "Frames":
        """Those of a model that reads this."""
        hop = shape.steps[0][1]
        return cls(hop, shape.samples_per_position // hop, shape.max_samples // hop, shape.sample_rate)

    def seconds(self, frames: int) -> float:
        """How long so many frames are."""
        return frames * self.hop / self.rate


@dataclass(frozen=True, slots=True)
class Slice:
    """Some tokens of a window, from `first` to before `last`, and when they are spoken, in positions of the window."""

    first: int
    last: int
    start: int
    end: int


def divide(tokens: Sequence[int], first_time: int, num_frames: int, stride: int) -> tuple[list[Slice], int]:
    """Divide the output about a window at its pairs of times.

    Args:
        tokens: Without the one that ended the output.
        first_time: Every id from here on is a time.
        num_frames: Of the window, without silence behind the sound.
        stride: Frames of a position.

    Returns:
        The slices, and after how many frames the next window begins.
    """
    is_time = [token_id >= first_time for token_id in tokens]
    ends = [i for i in range(1, len(tokens)) if is_time[i - 1] and is_time[i]]
    if not ends:  # the whole output is one segment
        times = [token_id for token_id in tokens if token_id >= first_time]
        end = times[-1] - first_time if times and times[-1] != first_time else num_frames // stride
        return [Slice(0, len(tokens), 0, end)], num_frames
    is_whole = is_time[-2:] == [False, True]  # nothing is said behind the last time
    if is_whole:
        ends.append(len(tokens))
    slices, first = [], 0
    for last in ends:
        slices.append(Slice(first, last, tokens[first] - first_time, tokens[last - 1] - first_time))
        first = last
    if is_whole:
        return slices, num_frames
    # What comes behind the last pair has no end: the next window begins with it. The pair stays whole.
    slices[-1] = replace(slices[-1], last=first + 1)
    return slices, slices[-1].end * stride


def compression_ratio(text: str) -> float:
    """How much shorter a text gets by compression: much, if it repeats itself."""
    data = text.encode()
    return len(data) / len(zlib.compress(data))


def mean_logprob(logprobs: Sequence[TokenLogprobs]) -> float:
    """Of an output, with the token that ended it."""
    return sum(each.logprob for each in logprobs) / max(len(logprobs), 1)
