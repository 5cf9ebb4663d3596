"""Models that hear answer as transformers' modules, id for id, from samples on."""

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from tests.engine.encoder_decoder_models import NUM_OUTPUT_TOKENS, SPEECH, VOCAB_SIZE, extractor, write_model
from tests.engine.test_encoder_decoder import WAYS, ids
from tests.engine.test_golden import build_engine, run
from weft.engine.batch import Samples
from weft.engine.describe.config import load_model_config
from weft.engine.loop.pending import RejectedError
from weft.engine.wire.inputs import AudioInput, AudioShape, EncoderInput
from weft.engine.wire.messages import AddRequest, BeamOptions
from weft.engine.wire.params import SamplingParams, TimestampRule

MIN_GAP = 2e-3


@dataclass(frozen=True)
class Heard:
    """Sounds, what the decoder begins with, and what transformers' module writes, with its log-probabilities."""

    folder: Path
    shape: AudioShape
    sounds: list[Samples]
    prompts: list[list[int]]
    outputs: list[list[int]]
    logprobs: list[torch.Tensor]


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("speech")


def sound(seed: int, num_samples: int) -> Samples:
    """A tone that changes, with noise."""
    draw = np.random.default_rng(seed)
    times = np.arange(num_samples) / 16_000
    tone = np.sin(
        2 * math.pi * np.cumsum(draw.uniform(200, 3000, num_samples // 800 + 1).repeat(800)[:num_samples]) / 16_000
    )
    return (8000 * tone * (0.5 + 0.5 * np.sin(9 * times)) + 500 * draw.standard_normal(num_samples)).astype(np.int16)


@cache
def heard(root: Path, name: str) -> Heard:
    kind = SPEECH[name][0]
    model = write_model(name, folder := root / name)
    features, start = extractor(kind), model.config.decoder_start_token_id
    config = load_model_config(folder)
    shape = config.audio
    assert shape is not None
    seconds = [1.0, 0.4, 0.7, 0.33, 1.0, 0.15]
    found = Heard(folder, shape, [], [], [], [])
    end = model.config.eos_token_id
    for seed in range(100):
        if len(found.sounds) == len(seconds):
            break
        index = len(found.sounds)
        samples = sound(seed, int(seconds[index] * 16_000))
        prompt = [start, *[7, 11, 13][: index % 3]]
        made = features(samples.astype(np.float32) / 32768, sampling_rate=16_000, return_tensors="pt")
        inputs = {key: value for key, value in made.items() if key in ("input_features", "input_values")}
        with torch.no_grad():
            encoded = model.get_encoder()(**inputs)
            written, rows = list(prompt), []
            while len(rows) < NUM_OUTPUT_TOKENS and (not rows or written[-1] != end):
                logits = model(encoder_outputs=encoded, decoder_input_ids=torch.tensor([written])).logits[0, -1]
                rows.append(torch.log_softmax(logits.float(), -1))
                written.append(int(rows[-1].argmax()))
        if (torch.stack(rows).topk(2).values.diff().abs()).min() > MIN_GAP:
            found.sounds.append(samples)
            found.prompts.append(prompt)
            found.outputs.append(written[len(prompt) :])
            found.logprobs.append(torch.stack(rows))
    assert len(found.sounds) == len(seconds), "too few sounds with clear answers"
    assert len({tuple(output) for output in found.outputs}) > 2, "the model answers everything alike"
    return found


def ask(
    shape: AudioShape, samples: Samples, prompt: list[int], number: int = 0, num_choices: int = 1, **more: Any
) -> AddRequest:
    params = SamplingParams(temperature=0, **({"max_tokens": NUM_OUTPUT_TOKENS} | more))
    hears = AudioInput(samples.tobytes(), shape.num_positions(len(samples)), prompt)
    return AddRequest(hears, params, num_choices, request_id=number)


@pytest.mark.parametrize(("name", "way"), [(name, i % len(WAYS)) for j, name in enumerate(SPEECH) for i in (j, j + 1)])
def test_ids_are_those_of_transformers(root: Path, name: str, way: int) -> None:
    expected, options = heard(root, name), dict(WAYS[way])
    num_choices, is_alone = options.pop("num_choices", 1), options.pop("is_alone", False)
    engine = build_engine(expected.folder, **options)
    adds = [
        ask(expected.shape, samples, prompt, number, num_choices, logprobs=2)
        for number, (samples, prompt) in enumerate(zip(expected.sounds, expected.prompts, strict=True))
    ]
    results: dict[Any, Any] = {}
    for batch in [[add] for add in adds] if is_alone else [adds]:
        results |= run(engine, batch)
    for number, output in enumerate(expected.outputs):
        for choice in range(num_choices):
            assert ids(results[number, choice]) == output
            rows = expected.logprobs[number]
            for entry, token_id, row in zip(results[number, choice].logprobs, output, rows, strict=False):
                assert abs(entry.logprob - row[token_id]) < 1e-4
    assert (engine.scheduler.counters.num_preemptions > 0) == ("num_blocks" in options)


def test_a_sound_is_heard_once(root: Path) -> None:
    """Another sound of as many positions finds nothing of it."""
    expected = heard(root, "whisper")
    engine = build_engine(expected.folder, block_size=16)
    first, second = expected.sounds[0], expected.sounds[4]
    for number, samples in enumerate((first, first, second)):
        run(engine, [ask(expected.shape, samples, [2], number)])
    assert engine.scheduler.counters.prefix_cache_hits == expected.shape.num_positions(0)


def test_what_is_not_heard_is_refused(root: Path) -> None:
    expected = heard(root, "moonshine")
    engine = build_engine(expected.folder, block_size=16)
    good = ask(expected.shape, expected.sounds[0], [1])
    assert isinstance(good.input, AudioInput)
    wrong = [
        AudioInput(good.input.samples, good.input.num_positions + 1, [1]),
        AudioInput(b"", expected.shape.num_positions(0), [1]),
        AudioInput(good.input.samples[:-1], good.input.num_positions, [1]),
        AudioInput(good.input.samples, good.input.num_positions, []),
        AudioInput(good.input.samples, good.input.num_positions, [VOCAB_SIZE]),
        AudioInput(
            bytes(2 * expected.shape.max_samples + 2), expected.shape.num_positions(expected.shape.max_samples), [1]
        ),
        EncoderInput([5], [1]),
    ]
    for number, request in enumerate(wrong):
        with pytest.raises(RejectedError):
            engine.add(0, AddRequest(request, SamplingParams(max_tokens=1), request_id=number))


RULE = TimestampRule(first_id=VOCAB_SIZE - 41, last_first_id=VOCAB_SIZE - 30, end_id=60)


class _Rules:
    """What WhisperTimeStampLogitsProcessor reads of a generation config."""

    no_timestamps_token_id = RULE.first_id - 1
    eos_token_id = bos_token_id = RULE.end_id
    max_initial_timestamp_index = RULE.last_first_id - RULE.first_id if RULE.last_first_id else None


@pytest.mark.parametrize("way", [0, 1, 3, 4])
def test_times_are_those_of_transformers(root: Path, way: int) -> None:
    """Ids that an output must not begin with and rules of times, with sampled and drafted rows."""
    expected, options = heard(root, "whisper"), dict(WAYS[way])
    options.pop("num_choices", 1)
    model = transformers.WhisperForConditionalGeneration.from_pretrained(expected.folder, dtype=torch.float32).eval()
    begin_bans, banned, prompt = (VOCAB_SIZE - 35, VOCAB_SIZE - 41), RULE.first_id - 1, [5, 7]
    outputs, searched = [], []
    for samples in expected.sounds:
        made = extractor("Whisper")(samples.astype(np.float32) / 32768, sampling_rate=16_000, return_tensors="pt")
        rules: Any = [
            transformers.SuppressTokensLogitsProcessor([banned]),
            transformers.SuppressTokensAtBeginLogitsProcessor(begin_bans, len(prompt)),
            transformers.WhisperTimeStampLogitsProcessor(_Rules(), len(prompt)),
        ]
        with torch.no_grad():
            encoded, written = model.get_encoder()(made["input_features"]), list(prompt)
            while len(written) < len(prompt) + 20 and written[-1] != RULE.end_id:
                now = torch.tensor([written])
                scores = model(encoder_outputs=encoded, decoder_input_ids=now).logits[:, -1].float()
                for rule in rules:
                    scores = rule(now, scores)
                written.append(int(scores.argmax()))
            found = transformers.GenerationMixin.generate(
                model,
                made["input_features"],
                decoder_input_ids=torch.tensor([prompt]),
                logits_processor=rules,
                generation_config=transformers.GenerationConfig(
                    num_beams=3, max_new_tokens=20, eos_token_id=RULE.end_id, pad_token_id=0
                ),
            )
        outputs.append(written[len(prompt) :])
        searched.append(found[0].tolist()[len(prompt) :])
    assert sum(i >= RULE.first_id for output in outputs for i in output) > len(outputs)
    assert any(i < RULE.first_id for output in outputs for i in output)
    engine = build_engine(expected.folder, **options)
    more: dict[str, Any] = {"begin_bans": begin_bans, "bad_words_token_ids": ((banned,),), "timestamps": RULE}
    more |= {"max_tokens": 20, "stop_token_ids": (RULE.end_id,), "ignore_eos": True}
    results = run(engine, [ask(expected.shape, s, prompt, n, **more) for n, s in enumerate(expected.sounds)])
    assert [ids(results[number, 0]) for number in range(len(outputs))] == outputs
    asked = [ask(expected.shape, s, prompt, n, **more) for n, s in enumerate(expected.sounds)]
    asked = [structs.replace(each, beams=BeamOptions(width=3)) for each in asked]
    results = run(build_engine(expected.folder, **options), asked)
    assert [ids(results[number, 0]) for number in range(len(outputs))] == searched
    assert searched != outputs


@pytest.mark.parametrize("last", [None, RULE.last_first_id])
@given(st.lists(st.integers(50, VOCAB_SIZE - 1), max_size=6))
@settings(max_examples=200, deadline=None)
def test_bounds_are_those_of_transformers(last: int | None, written: list[int]) -> None:
    rule = TimestampRule(RULE.first_id, last, RULE.end_id)
    rules = _Rules()
    rules.max_initial_timestamp_index = None if last is None else last - rule.first_id
    processor = transformers.WhisperTimeStampLogitsProcessor(rules, 0, _detect_timestamp_from_logprob=False)
    allowed = torch.isfinite(processor(torch.tensor([written]).long(), torch.zeros(1, VOCAB_SIZE))[0])
    text, text_end, time, time_end = rule.bounds(written)
    ids_allowed = {*range(text, text_end), *range(time, min(time_end, VOCAB_SIZE))} - {rule.first_id - 1}
    assert ids_allowed == set(torch.where(allowed)[0].tolist())
