"""Speech to text through `weft serve` and the SDK answers as transformers' Whisper generates."""

import io
import json
import math
import wave
from collections.abc import Iterator
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import tokenizers
import torch
from openai.types.audio import TranscriptionVerbose
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

from tests.end_to_end.conftest import LiveServer, serving
from tests.engine.test_alignment import begins

RATE = 16000
END, START, ENGLISH, GERMAN, TRANSLATE, TRANSCRIBE, PREVIOUS, SILENCE, NO_TIMES = range(30, 39)
SPECIAL = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>"]
SPECIAL += ["<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]
GREEDY = 1e-6
"""A temperature that is a wish, so that nothing is made anew."""
NUM_TIMES = 51
"""A window is a second: 100 frames, 50 positions."""

GENERATION = {
    "is_multilingual": True,
    "lang_to_id": {"<|en|>": ENGLISH, "<|de|>": GERMAN},
    "task_to_id": {"transcribe": TRANSCRIBE, "translate": TRANSLATE},
    "no_timestamps_token_id": NO_TIMES,
    "prev_sot_token_id": PREVIOUS,
    "max_initial_timestamp_index": 20,
    "suppress_tokens": [*range(START, NO_TIMES), 5],
    "begin_suppress_tokens": [1, END],
    "max_length": 40,
    "alignment_heads": [[0, 1], [1, 2]],
}


def write_whisper(folder: Path) -> WhisperForConditionalGeneration:
    """Write a tiny random checkpoint; returns transformers' module."""
    pieces = ["<unk>", "▁", *"abcdefghijklmnopqrstuvwxyz.,"]
    tokenizer = tokenizers.Tokenizer(models.Unigram([(piece, -3.0) for piece in pieces], 0, False))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([AddedToken(f"<|{i * 0.02:.2f}|>") for i in range(NUM_TIMES)])
    assert tokenizer.token_to_id("<|notimestamps|>") == NO_TIMES
    torch.manual_seed(1)
    config = WhisperConfig(
        vocab_size=tokenizer.get_vocab_size(),
        d_model=48,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_mel_bins=20,
        max_source_positions=50,
        max_target_positions=64,
        decoder_start_token_id=START,
        eos_token_id=END,
        bos_token_id=END,
        pad_token_id=END,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    model = WhisperForConditionalGeneration(config).eval().float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.requires_grad and weight.dim() > 1:
                weight.normal_(0, 0.9 if "decoder.embed" in name else 0.5)
            elif "norm" not in name:
                weight.normal_(0, 0.1)
        model.tie_weights()
    for name, value in GENERATION.items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(folder)
    extractor().save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    return model


def extractor() -> WhisperFeatureExtractor:
    return WhisperFeatureExtractor(feature_size=20, chunk_length=1)


def sound(seed: int, seconds: float) -> Any:
    """A tone that changes, with noise."""
    draw, size = np.random.default_rng(seed), int(seconds * RATE)
    pitch = draw.uniform(200, 3000, size // 800 + 1).repeat(800)[:size]
    tone = np.sin(2 * math.pi * np.cumsum(pitch) / RATE)
    return (8000 * tone + 500 * draw.standard_normal(size)).astype(np.int16)


def file_of(samples: Any) -> tuple[str, bytes]:
    with wave.open(file := io.BytesIO(), "wb") as written:
        written.setparams((1, 2, RATE, 0, "NONE", ""))
        written.writeframes(samples.tobytes())
    return "a.wav", file.getvalue()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[WhisperForConditionalGeneration, Path]:
    folder = tmp_path_factory.mktemp("whisper")
    return write_whisper(folder), folder


@pytest.fixture(scope="module")
def server(
    reference: tuple[WhisperForConditionalGeneration, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveServer]:
    log = tmp_path_factory.mktemp("log") / "log"
    with serving(log, str(reference[1]), "--served-model-name", "m", "--dtype", "float32") as live:
        yield live


@pytest.fixture(scope="module")
def client(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0)


def features_of(samples: Any) -> torch.Tensor:
    made: torch.Tensor = extractor()(samples.astype(np.float32) / 32768, sampling_rate=RATE, return_tensors="pt")[
        "input_features"
    ]
    return made


def generated(model: WhisperForConditionalGeneration, samples: Any, **options: Any) -> Any:
    with torch.no_grad():
        return model.generate(features_of(samples), task="transcribe", force_unique_generate_call=True, **options)


def text_of(ids: list[int]) -> str:
    pieces = ["", " ", *"abcdefghijklmnopqrstuvwxyz.,"]
    return "".join(pieces[i] for i in ids if i < END).strip()


def test_short_sounds(client: openai.OpenAI, reference: Any) -> None:
    texts = set()
    for seed in range(6):
        samples = sound(seed, (1.0, 0.4, 0.7)[seed % 3])
        options: dict[str, Any] = {"language": "en"} if seed % 2 else {}
        answer = client.audio.transcriptions.create(model="m", file=file_of(samples), temperature=GREEDY, **options)
        expected = generated(reference[0], samples, **options)[0].tolist()
        assert answer.text == text_of(expected)
        texts.add(answer.text)
    assert len(texts) > 3


def test_a_long_sound(client: openai.OpenAI, reference: Any) -> None:
    samples = sound(7, 3.3)
    answer = client.audio.transcriptions.create(
        model="m", file=file_of(samples), language="de", response_format="verbose_json", temperature=GREEDY
    )
    assert isinstance(answer, TranscriptionVerbose) and answer.segments is not None
    windows = {seek: list(each) for seek, each in groupby(answer.segments, lambda segment: segment.seek)}
    assert len(windows) > 3
    seek, total = 0, len(samples) // 160
    while seek < total:
        options = {"return_timestamps": True, "return_segments": True}
        window = samples[160 * seek :][:RATE]
        made = generated(reference[0], window, language="de", **options)["segments"][0]
        expected, segments = [each for each in made if text_of(each["tokens"].tolist())], windows.pop(seek, [])
        assert [each.tokens for each in segments] == [each["tokens"].tolist() for each in expected]
        for each, other in zip(segments, expected, strict=True):
            at = [float(other[side]) + seek / 100 for side in ("start", "end")]
            assert [each.start, each.end] == pytest.approx(at)
        *_, end, _ = [NO_TIMES, *made[-1]["tokens"].tolist()]
        done = 2 * (end - NO_TIMES - 1) if end > NO_TIMES else 0  # a pair of times: what is behind it is open
        seek += done or min(total - seek, 100)
    assert not windows


def test_words(client: openai.OpenAI, reference: Any) -> None:
    """Each begins where transformers' functions find it in the attention of its module, and ends where one begins."""
    model, samples = reference[0], sound(3, 0.9)
    answer: Any = client.audio.transcriptions.create(
        model="m",
        file=file_of(samples),
        language="en",
        response_format="verbose_json",
        timestamp_granularities=["word", "segment"],
        temperature=GREEDY,
    )
    assert isinstance(answer, TranscriptionVerbose) and answer.segments and answer.words
    begun, expected = [START, ENGLISH, TRANSCRIBE, NO_TIMES], []
    windows = {seek: list(each) for seek, each in groupby(answer.segments, lambda segment: segment.seek)}
    assert len(windows) == 2
    for (seek, segments), end in zip(windows.items(), [*list(windows)[1:], 90], strict=True):
        texts = [[token_id for token_id in segment.tokens if token_id < END] for segment in segments]
        tokens, most = [*begun, *chain(*texts), END], (end - seek) // 2
        features, heads = features_of(samples[160 * seek :]), GENERATION["alignment_heads"]
        times = begins(model, features, tokens, len(begun), most, heads)
        for text in texts:  # one word, for none of its tokens begins with a space
            expected += [seek / 100 + 0.02 * times[0], seek / 100 + 0.02 * times[len(text)]]
            times = times[len(text) :]
    assert [word.word for word in answer.words] == [segment.text for segment in answer.segments]
    assert [time for word in answer.words for time in (word.start, word.end)] == pytest.approx(expected)
    alone: Any = client.audio.transcriptions.create(
        model="m",
        file=file_of(samples),
        language="en",
        response_format="verbose_json",
        timestamp_granularities=["word"],
        temperature=GREEDY,
    )
    assert alone.words == answer.words
    assert alone.segments is None


def test_text_routes_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="turns speech into text"):
        client.completions.create(model="m", prompt="a")
