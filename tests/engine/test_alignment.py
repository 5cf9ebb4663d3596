"""When words are spoken: the path through the attention of a Whisper is the one that transformers finds."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.whisper import generation_whisper as theirs

from tests.engine.encoder_decoder_models import extractor, write_model
from tests.engine.test_encoder_decoder import ids
from tests.engine.test_golden import build_engine, run
from tests.engine.test_speech import ask, sound
from weft.engine.batch import Samples
from weft.engine.describe.config import load_model_config
from weft.engine.loop.pending import RejectedError
from weft.engine.sampling.alignment import align
from weft.engine.wire.inputs import AudioInput
from weft.engine.wire.messages import AddRequest
from weft.engine.wire.params import PooledOutput, Pooling, SamplingParams

HEADS = [[0, 1], [1, 0], [1, 3]]
NUM_POSITIONS = 50


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("aligned")
    model = write_model("whisper", folder)
    file = folder / "generation_config.json"
    own = json.loads(file.read_text()) | {"alignment_heads": [*HEADS[::-1], [7, 0], [0, "1"], 3]}
    file.write_text(json.dumps(own))
    return model, folder


def begins(
    model: Any, features: torch.Tensor, tokens: list[int], num_begun: int, num_positions: int, heads: Any = HEADS
) -> list[int]:
    """By transformers' functions, of the attention of its module."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        made = model(features, decoder_input_ids=torch.tensor([tokens]), output_attentions=True)
    model.set_attn_implementation(before)
    weights = torch.stack([made.cross_attentions[layer][0, head, :, :num_positions] for layer, head in heads])
    weights = weights / weights.sum(-1, keepdim=True)
    std, mean = torch.std_mean(weights, dim=-2, keepdim=True, unbiased=False)
    smooth = theirs._median_filter((weights - mean) / std, 7).mean(0)
    rows, columns = theirs._dynamic_time_warping(-smooth[num_begun - 1 : -1].double().numpy())
    return [int(columns[list(rows).index(row)]) for row in range(len(tokens) - num_begun)]


def aligned(samples: Samples, tokens: list[int], number: int, num_begun: int, num_positions: int) -> AddRequest:
    hears, params = AudioInput(samples.tobytes(), NUM_POSITIONS, tokens), SamplingParams(max_tokens=0)
    return AddRequest(hears, params, request_id=number, pooling=Pooling(aligned=(num_begun, num_positions)))


@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"chunk": 128}, {"num_blocks": 24}], ids=str)
def test_a_path_is_that_of_transformers(whisper: tuple[Any, Path], options: dict[str, Any]) -> None:
    """In steps with other sounds, and with requests that write; also where the same sound was heard before."""
    model, folder = whisper
    engine, shape = build_engine(folder, **options), load_model_config(folder).audio
    assert shape is not None
    sounds = [sound(seed, 16_000) for seed in range(3)]
    alone = ids(run(engine, [ask(shape, sounds[2], [3, 7])])[0, 0])
    draw = np.random.default_rng(0)
    asked = [
        (samples, [3, *draw.integers(4, 90, size).tolist()], num_begun, num_positions)
        for samples, size, num_begun, num_positions in zip(
            [*sounds, sounds[0]], (30, 12, 1, 20), (4, 1, 1, 3), (50, 37, 50, 3), strict=True
        )
    ]
    adds = [aligned(samples, tokens, number, *more) for number, (samples, tokens, *more) in enumerate(asked)]
    results = run(engine, [ask(shape, sounds[2], [3, 7], 9), *adds])
    assert ids(results[9, 0]) == alone
    for number, (samples, tokens, num_begun, num_positions) in enumerate(asked):
        output = results[number, 0]
        assert isinstance(output, PooledOutput)
        features = extractor("Whisper")(samples / np.float32(32768), sampling_rate=16_000, return_tensors="pt")
        expected = begins(model, features.input_features, tokens, num_begun, num_positions)
        assert np.frombuffer(output.values, "<f4").tolist() == expected
        assert output.num_rows == len(tokens) - num_begun


@pytest.mark.parametrize(
    ("pooling", "fault"),
    [
        (Pooling(), "this engine makes no vectors"),
        (Pooling(aligned=(0, 50)), "aligned: tokens before the text must be between 1 and 2, got 0"),
        (Pooling(aligned=(3, 50)), "aligned: tokens before the text must be between 1 and 2, got 3"),
        (Pooling(aligned=(1, 51)), "aligned: positions must be between 1 and 50, got 51"),
        (Pooling(True, aligned=(1, 50)), "aligned is only allowed alone"),
    ],
)
def test_what_cannot_be_aligned_is_refused(whisper: tuple[Any, Path], pooling: Pooling, fault: str) -> None:
    engine = build_engine(whisper[1])
    add = AddRequest(
        AudioInput(sound(0, 16_000).tobytes(), NUM_POSITIONS, [3, 4, 5]), SamplingParams(max_tokens=0), pooling=pooling
    )
    with pytest.raises(RejectedError, match=fault):
        engine.add(0, add)


def test_equal_attention_is_no_fault() -> None:
    """Its deviation is 0, and nothing is divided by that."""
    found = align(torch.zeros(2, 5, 9), 1, 7)
    assert len(found) == 4
    assert np.isfinite(found).all()
