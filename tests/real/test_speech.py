"""A real Whisper beside transformers: what espeak-ng speaks, as text and with times, through `weft serve`."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from openai.types.audio import TranscriptionVerbose
from transformers import AutoTokenizer, WhisperFeatureExtractor

from tests.end_to_end.conftest import serving
from tests.engine.test_alignment import begins
from tests.real.whisper import (
    END,
    ENGLISH,
    NO_TIMES,
    RATE,
    SENTENCES,
    START,
    TRANSCRIBE,
    samples_of,
    spoken,
    word_errors,
    write_checkpoint,
)

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="espeak-ng speaks the texts, and is not installed"),
]
SHORT = 3


def generated(model: Any, tokenizer: Any, path: Path) -> list[tuple[str, float, float]]:
    """The segments of transformers' `generate`: text, start and end."""
    made = WhisperFeatureExtractor()(samples_of(path), sampling_rate=RATE, return_tensors="pt")
    with torch.no_grad():
        found = model.generate(
            made["input_features"], return_timestamps=True, return_segments=True, task="transcribe", language="en"
        )
    return [
        (tokenizer.decode(each["tokens"], skip_special_tokens=True), float(each["start"]), float(each["end"]))
        for each in found["segments"][0]
    ]


def check_words(client: openai.OpenAI, model: Any, tokenizer: Any, path: Path) -> None:
    """Words begin where transformers' functions find them in the attention of its module."""
    answer: Any = client.audio.transcriptions.create(
        model="whisper-base",
        file=path,
        language="en",
        response_format="verbose_json",
        timestamp_granularities=["word", "segment"],
        temperature=0,
    )
    begun, end = [START, ENGLISH, TRANSCRIBE, NO_TIMES], END
    text = [token_id for segment in answer.segments for token_id in segment.tokens if token_id < end]
    samples = samples_of(path)
    features = WhisperFeatureExtractor()(samples, sampling_rate=RATE, return_tensors="pt")["input_features"]
    heads = model.generation_config.alignment_heads
    times = begins(model, features, [*begun, *text, end], len(begun), len(samples) // 320, heads)
    first = [index for index, token_id in enumerate(text) if tokenizer.decode([token_id]).startswith(" ")]
    assert [word.start for word in answer.words] == pytest.approx([0.02 * times[index] for index in first], abs=0.03)
    assert " ".join(word.word for word in answer.words) == answer.text


def test_what_is_spoken(
    real_path: Callable[[str], Path], is_whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_checkpoint(real_path("whisper-base"), folder := tmp_path / "whisper-base")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    errors = words = 0
    monkeypatch.delenv("WEFT_REAL", raising=False)  # to the server, no setting of its own
    with serving(tmp_path / "log", str(folder), "--dtype", "float32") as server:
        client = openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0)
        for sentence in SENTENCES[: None if is_whole else SHORT]:
            path = spoken(sentence, tmp_path)
            answer = client.audio.transcriptions.create(
                model="whisper-base", file=path, response_format="verbose_json", temperature=0
            )
            assert isinstance(answer, TranscriptionVerbose) and answer.segments is not None
            assert answer.language == "english"
            expected = generated(model, tokenizer, path)
            assert [each.text for each in answer.segments] == [text for text, _, _ in expected]
            for each, (_, start, end) in zip(answer.segments, expected, strict=True):
                assert (each.start, each.end) == pytest.approx((start, end), abs=0.02)
            check_words(client, model, tokenizer, path)
            wrong, count = word_errors(sentence, answer.text)
            errors, words = errors + wrong, words + count
    assert errors < 0.25 * words  # of a voice that is hardly one; transformers' are the same, for the texts are
