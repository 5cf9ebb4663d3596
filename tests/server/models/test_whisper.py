"""What Whisper checkpoints say, in the files of today and in older ones."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

from tests.server.conftest import EOS, ByteTokenizer
from tests.server.hearing import (
    CONFIG,
    ENGLISH,
    GENERATION,
    GERMAN,
    NO_TIMES,
    PREVIOUS,
    START,
    TIME,
    TRANSCRIBE,
    TRANSLATE,
)
from weft.engine.wire.params import TimestampRule
from weft.server.errors import InvalidRequestError, UnsupportedValueError
from weft.server.models.whisper import _OTHERS, LANGUAGES, Whisper, read_whisper

TOKENS = {"<|en|>": ENGLISH, "<|de|>": GERMAN, "<|transcribe|>": TRANSCRIBE, "<|translate|>": TRANSLATE}
TOKENS |= {"<|notimestamps|>": NO_TIMES, "<|startofprev|>": PREVIOUS}


def read(folder: Path, generation: dict[str, Any], **config: Any) -> Whisper | None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    (folder / "generation_config.json").write_text(json.dumps(generation))
    tokenizer: Any = ByteTokenizer()
    tokenizer.added_ids = TOKENS
    return read_whisper(folder, tokenizer)


def test_files_of_today(tmp_path: Path) -> None:
    whisper = read(tmp_path, GENERATION)
    assert whisper is not None
    assert whisper.languages == {"en": ENGLISH, "de": GERMAN}
    assert whisper.begin("de", "translate", has_times=True) == [START, GERMAN, TRANSLATE]
    assert whisper.begin("de", "transcribe", has_times=False) == [START, GERMAN, TRANSCRIBE, NO_TIMES]
    assert (whisper.language, whisper.previous) == (None, PREVIOUS)


def test_old_files_whose_languages_stand_among_the_tokens(tmp_path: Path) -> None:
    """They force what the decoder begins with, which transformers leaves out where a task is given, as here always."""
    for first in (None, GERMAN):
        whisper = read(tmp_path, {}, forced_decoder_ids=[[1, first], [2, TRANSCRIBE], [3, NO_TIMES]])
        assert whisper is not None
        assert (whisper.language, whisper.no_times, whisper.previous) == (None, NO_TIMES, PREVIOUS)
        assert whisper.begin("en", "transcribe", has_times=False) == [START, ENGLISH, TRANSCRIBE, NO_TIMES]


@pytest.mark.parametrize("said", [{"is_multilingual": False}, {"forced_decoder_ids": [[1, NO_TIMES]]}])
def test_models_of_english_alone(said: dict[str, Any], tmp_path: Path) -> None:
    whisper = read(tmp_path, {"no_timestamps_token_id": NO_TIMES, **said})
    assert whisper is not None
    assert whisper.begin(None, "transcribe", has_times=False) == [START, NO_TIMES]
    assert whisper.begin(None, "transcribe", has_times=True) == [START]
    assert whisper.code_of("English") == "en"
    with pytest.raises(InvalidRequestError, match="must be one of en, got 'de'"):
        whisper.code_of("de")


def test_languages_by_code_and_name(tmp_path: Path) -> None:
    whisper = read(tmp_path, {**GENERATION, "language": "<|de|>"})
    assert whisper is not None and whisper.language == "de"
    assert [whisper.code_of(name) for name in ("de", "DE", "german", "<|en|>")] == ["de", "de", "de", "en"]
    assert {_OTHERS[name] for name in TO_LANGUAGE_CODE if name not in LANGUAGES.values()} <= set(LANGUAGES)
    with pytest.raises(InvalidRequestError, match="must be one of de, en, got 'french'"):
        whisper.code_of("french")
    assert (len(LANGUAGES), LANGUAGES["ht"], LANGUAGES["yue"]) == (100, "haitian creole", "cantonese")


@pytest.mark.parametrize(
    ("said", "num_begun", "most"),
    [
        ({"max_length": 448}, 4, 444),
        ({"max_length": 448}, 227, 221),
        ({"max_length": 100}, 4, 100),
        ({"max_length": 100}, 227, 96),
        ({"max_new_tokens": 30}, 4, 30),
        ({}, 4, 444),
    ],
)
def test_outputs_are_as_long_as_those_of_transformers(
    said: dict[str, Any], num_begun: int, most: int, tmp_path: Path
) -> None:
    whisper = read(tmp_path, {**without("max_length"), **said})
    assert whisper is not None
    params = whisper.params(num_begun, 448, EOS, has_times=False)
    assert (params.max_tokens, params.timestamps, params.bad_words_token_ids) == (most, None, ((7,), (8,)))
    params = whisper.params(num_begun, 448, EOS, has_times=True)
    assert params.timestamps == TimestampRule(TIME, TIME + 5, EOS)
    assert params.bad_words_token_ids == ((7,), (8,), (NO_TIMES,))


def test_prompts(tmp_path: Path) -> None:
    whisper, tokenizer = read(tmp_path, GENERATION), ByteTokenizer()
    assert whisper is not None
    assert whisper.prompt_ids(" a b ", tokenizer, 3) == [PREVIOUS, *b"a b"]
    without = read(tmp_path, {**GENERATION, "prev_sot_token_id": None})
    assert without is not None and without.previous == PREVIOUS
    TOKENS.pop("<|startofprev|>")
    try:
        without = read(tmp_path, {**GENERATION, "prev_sot_token_id": None})
    finally:
        TOKENS["<|startofprev|>"] = PREVIOUS
    assert without is not None
    with pytest.raises(UnsupportedValueError, match="takes none"):
        without.prompt_ids("a", tokenizer, 3)


def test_other_models_and_broken_files(tmp_path: Path) -> None:
    assert read(tmp_path, GENERATION, model_type="moonshine") is None
    assert read(tmp_path, {**GENERATION, "lang_to_id": 3, "language": ["de"]}) == read(tmp_path, without("lang_to_id"))
    assert read(tmp_path, GENERATION, decoder_start_token_id="x") is None
    TOKENS.pop("<|notimestamps|>")
    try:
        assert read(tmp_path, without("no_timestamps_token_id")) is None
    finally:
        TOKENS["<|notimestamps|>"] = NO_TIMES


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in GENERATION.items() if key != name}
