"""Windows are divided as transformers divides them."""

import random

import pytest
import torch
from transformers.models.whisper.generation_whisper import WhisperGenerationMixin

from weft.engine.wire.inputs import AudioShape
from weft.server.speech.segments import Frames, Slice, compression_ratio, divide

TIME = 100
WHISPER = AudioShape(16000, 480000, ((160, 160, 0), (3, 1, 1), (3, 2, 1)), True)


def test_frames_of_a_whisper() -> None:
    frames = Frames.of(WHISPER)
    assert frames == Frames(160, 2, 3000, 16000)
    assert frames.seconds(3000) == 30


@pytest.mark.parametrize(
    ("tokens", "slices", "num_done"),
    [
        ([], [Slice(0, 0, 0, 1500)], 3000),
        ([1, 2], [Slice(0, 2, 0, 1500)], 3000),
        ([TIME, 1, 2], [Slice(0, 3, 0, 1500)], 3000),
        ([TIME, 1, TIME + 90], [Slice(0, 3, 0, 90)], 3000),
        # A pair ends a segment, and the next window begins with it.
        ([TIME, 1, TIME + 90, TIME + 95], [Slice(0, 4, 0, 90)], 180),
        ([TIME, 1, TIME + 90, TIME + 95, 2], [Slice(0, 4, 0, 90)], 180),
        # A time at the end, alone: nothing is said behind it.
        ([TIME, 1, TIME + 90, TIME + 95, 2, TIME + 99], [Slice(0, 3, 0, 90), Slice(3, 6, 95, 99)], 3000),
    ],
)
def test_divide(tokens: list[int], slices: list[Slice], num_done: int) -> None:
    assert divide(tokens, TIME, 3000, 2) == (slices, num_done)


def test_random_outputs_are_divided_as_transformers_does() -> None:
    draw, num_pairs = random.Random(3), 0
    for _ in range(500):
        num_frames, seek = 2 * draw.randint(10, 1500), 2 * draw.randint(0, 5000)
        tokens, now = [TIME + draw.randint(0, 3)], 0
        for _ in range(draw.randint(0, 12)):
            now += draw.randint(1, 20)
            tokens += draw.choice(([draw.randint(0, 99)], [TIME + now, TIME + now], [draw.randint(0, 9), TIME + now]))
        segments, offset = WhisperGenerationMixin._retrieve_segment(
            seek_sequence=torch.tensor(tokens),
            seek_outputs=[{}],
            time_offset=torch.tensor([seek * 0.01], dtype=torch.float64),
            timestamp_begin=TIME,
            seek_num_frames=torch.tensor([num_frames]),
            time_precision=0.02,
            time_precision_features=0.01,
            input_stride=2,
            prev_idx=0,
            idx=0,
            return_token_timestamps=False,
            decoder_input_ids=torch.zeros(1, 3),
        )
        slices, num_done = divide(tokens, TIME, num_frames, 2)
        assert num_done == int(offset)
        assert [tokens[each.first : each.last] for each in slices] == [each["tokens"].tolist() for each in segments]
        for ours, theirs in zip(slices, segments, strict=True):
            assert seek * 0.01 + ours.start * 0.02 == pytest.approx(float(theirs["start"]))
            # Theirs loses a position to rounding where the window has no time.
            assert seek * 0.01 + ours.end * 0.02 == pytest.approx(float(theirs["end"]), abs=0.0201)
        num_pairs += len(slices) > 1
    assert num_pairs > 50


def test_repetition_compresses_well() -> None:
    assert compression_ratio("") == 0
    assert compression_ratio("The quick brown fox jumps over the lazy dog.") < 1.2
    assert compression_ratio("no no no " * 40) > 10
