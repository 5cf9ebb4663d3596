import os
import pathlib

import pytest

from weft.server.models.served_model import read_generation_defaults
from weft.server.sampling import GenerationDefaults


def write(folder: pathlib.Path, text: str) -> GenerationDefaults:
    (folder / "generation_config.json").write_text(text)
    return read_generation_defaults(folder)


def test_reads_the_sampling_part(tmp_path: pathlib.Path) -> None:
    defaults = write(
        tmp_path, '{"temperature": 0.6, "top_k": 20, "top_p": 1, "do_sample": true, "eos_token_id": [1, 2]}'
    )
    assert defaults == GenerationDefaults(temperature=0.6, top_k=20, top_p=1)


def test_no_file_means_no_defaults(tmp_path: pathlib.Path) -> None:
    assert read_generation_defaults(tmp_path) == GenerationDefaults()


@pytest.mark.parametrize("text", ["{", "[]", "\xff", "[" * 200_000, '{"a":' + "[" * 200_000 + "]" * 200_000 + "}"])
def test_a_broken_file_is_said_and_left_out(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    assert write(tmp_path, text) == GenerationDefaults()
    assert "generation_config.json" in caplog.text


@pytest.mark.parametrize("value", ['"0.6"', "true", "[1]", "0.5"])
def test_a_value_of_another_type_is_said_and_left_out(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, value: str
) -> None:
    assert write(tmp_path, f'{{"top_k": {value}, "min_p": 0.1, "top_p": null}}') == GenerationDefaults(min_p=0.1)
    assert "top_k" in caplog.text


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", 1e308), ("temperature", -1.0), ("top_p", 2), ("min_p", -0.5), ("top_k", -7),
     ("repetition_penalty", 0)],
)  # fmt: skip
def test_a_value_that_no_request_may_have_is_said_and_left_out(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, name: str, value: float
) -> None:
    """Every request that left it out was refused because of it."""
    assert write(tmp_path, f'{{"{name}": {value}, "eos_token_id": 1}}') == GenerationDefaults()
    assert name in caplog.text


def test_minus_one_is_all(tmp_path: pathlib.Path) -> None:
    assert write(tmp_path, '{"top_k": -1}') == GenerationDefaults(top_k=-1)


def test_what_is_no_file_or_too_large_is_not_read(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "generation_config.json"
    os.mkfifo(path)
    assert read_generation_defaults(tmp_path) == GenerationDefaults()  # and nobody waits for a writer
    path.unlink()
    with path.open("wb") as file:
        file.truncate(3 << 30)
    assert read_generation_defaults(tmp_path) == GenerationDefaults()
    assert "must have at most" in caplog.text


def test_what_is_assumed_is_told_from_what_is_stated(tmp_path: pathlib.Path) -> None:
    defaults = write(tmp_path, '{"temperature": 0.6, "assumed": {"temperature": 0.8, "top_k": 40, "min_p": 7}}')
    assert defaults.values() == {"temperature": 0.6, "top_k": 40}
    assert defaults.over({"top_k": 5, "top_p": 0.9}) == {"temperature": 0.6, "top_k": 5, "top_p": 0.9}
    assert str(defaults) == "temperature 0.6; as in llama.cpp with top_k 40"
    assert str(defaults.with_stated({"top_k": 3})) == "temperature 0.6, top_k 3"


@pytest.mark.parametrize("text", ["3", "[1]", "null"])
def test_what_is_assumed_in_no_mapping_is_left_out(tmp_path: pathlib.Path, text: str) -> None:
    assert write(tmp_path, f'{{"top_p": 0.5, "assumed": {text}}}') == GenerationDefaults(top_p=0.5)
