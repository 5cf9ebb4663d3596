"""Folders that are made of GGUF files: starts at the same time, what stays of older ones, what ends an answer."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Kind

from tests.checkpoints import Checkpoint
from tests.gguf_files import write_model
from weft.engine.gguf import folder
from weft.engine.gguf.file import GgufError, GgufModel
from weft.engine.gguf.folder import choose, made_folder

SIZES: dict[str, object] = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
FILES = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return write_model(tmp_path / "model", "qwen3", Checkpoint("qwen3", SIZES), lambda name: Kind.F32)[0]


def made(file: Path) -> Path:
    found = made_folder(file)
    assert {path.name for path in found.iterdir()} == FILES
    return found


def test_two_starts_at_once_end_with_one_folder(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second could not give its folder the name, and did not start."""
    rename, others = os.rename, list[Path]()

    def rename_later(*paths: Any) -> None:
        monkeypatch.setattr(os, "rename", rename)
        others.append(made(file))
        rename(*paths)

    monkeypatch.setattr(os, "rename", rename_later)
    assert [made(file)] == others
    assert list(others[0].parents[1].iterdir()) == [others[0].parent]


def test_a_folder_is_made_of_this_file_by_this_code(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = made(file)
    kept = os.stat(first / "config.json").st_mtime_ns
    assert made(file) == first and os.stat(first / "config.json").st_mtime_ns == kept
    monkeypatch.setattr(folder, "_code", lambda: "newer")
    second = made(file)
    os.utime(file, ns=(0, 5))
    third = made(file)
    assert len({first, second, third}) == 3
    assert {path.name for path in first.iterdir()} == FILES, "a server may still run from it"
    long_ago = time.time() - folder._UNUSED_S - 60
    os.utime(first.parent, (long_ago, long_ago))
    os.utime(file, ns=(0, 6))
    made(file)
    assert second.is_dir() and third.is_dir() and not first.parent.exists()


def test_a_read_only_folder_that_is_there_is_used(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = made(file)

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "utime", refuse)
    assert made(file) == first
    assert json.loads((first / "config.json").read_text())["quantization_config"]["files"] == [str(file)]


@pytest.mark.parametrize(
    ("architecture", "tokens", "ids", "ends"),
    [
        ("llama", ["a", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"], {"eos": 3}, [3, 2, 1]),
        ("gpt-oss", ["<|return|>", "<|end|>", "<|call|>", "<|endoftext|>"], {"eos": 0}, [0, 3, 2]),
        ("phi3", ["<|end|>", "a", "<|endoftext|>"], {"eos": 2, "eot": 1}, [2, 1, 0]),
        ("qwen2", ["a", "b"], {"eos": 2, "eot": -1, "eom": 1}, [1]),
    ],
)
def test_all_that_ends_an_answer(architecture: str, tokens: list[str], ids: dict[str, int], ends: list[int]) -> None:
    """Answers of gpt-oss went on behind a call. Types of tokens need not be in the file, or right."""
    metadata = {f"tokenizer.ggml.{name}_token_id": index for name, index in ids.items()}
    model = GgufModel((), {"general.architecture": architecture, "tokenizer.ggml.tokens": tokens, **metadata}, {})
    assert folder._generation(model)["eos_token_id"] == ends


def test_files_beside_those_of_a_model_are_no_models() -> None:
    beside = ["imatrix_unsloth.gguf", "m-imatrix.gguf", "m.IMATRIX.gguf", "mmproj-F16.gguf", "m-mmproj-BF16.gguf"]
    assert choose([*beside, "m-imatrix-Q4_K_M.gguf"], None) == ["m-imatrix-Q4_K_M.gguf"]


@pytest.mark.parametrize("says", [{}, {"qwen3.pooling_type": 0}])
def test_a_model_without_pooling_generates(says: dict[str, int]) -> None:
    assert folder._pooling(GgufModel((), {"general.architecture": "qwen3", **says}, {})) == {}


def test_a_pooling_that_is_not_supported_is_named() -> None:
    """Such as that of a reranker."""
    with pytest.raises(GgufError, match=r"^pooling_type 4 is not supported \(supported: 0 none, 1 mean, 2 cls, 3 last"):
        folder._pooling(GgufModel((), {"general.architecture": "qwen3", "qwen3.pooling_type": 4}, {}))


def test_what_a_file_does_not_say_of_sampling_is_as_in_llama_cpp(file: Path) -> None:
    sampling = json.loads((made(file) / "generation_config.json").read_text())
    del sampling["eos_token_id"]
    assert sampling == {"assumed": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}}


def test_what_a_file_says_of_sampling_goes_first() -> None:
    values = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20, "general.sampling.penalty_repeat": 1.1}
    generation = folder._generation(GgufModel((), {"tokenizer.ggml.tokens": ["a"], **values}, {}))
    del generation["eos_token_id"]
    assert generation.pop("assumed") == {"top_p": 0.95, "min_p": 0.05}
    assert generation == {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}
