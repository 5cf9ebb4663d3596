"""What people type for a model, and what it means."""

import contextlib
from pathlib import Path

import pytest

from weft.server.library.download import LibraryError
from weft.server.library.names import OnHub, OnWeb, Source, elsewhere, known_models, parse

QWEN = OnHub("Qwen/Qwen3-0.6B-GGUF", "Q8_0")
GGUF = OnHub("org/m-GGUF", "Q4_K_M")
ADDRESS = "https://a.example:8443/b%20c/m.gguf?token=1"
FILE = OnHub("org/m-GGUF", "sub dir/m.gguf")


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("org/model", OnHub("org/model")),
        ("gpt2", OnHub("gpt2")),
        ("org/m-GGUF:Q4_K_M", GGUF),
        ("org/m-GGUF:m-Q4_K_M.gguf", OnHub("org/m-GGUF", "m-Q4_K_M.gguf")),
        ("hf.co/org/m-GGUF:Q4_K_M", GGUF),
        ("HF.co/org/m-GGUF:Q4_K_M", GGUF),
        ("https://hf.co/org/model/", OnHub("org/model")),
        ("huggingface.co/org/model", OnHub("org/model")),
        ("https://huggingface.co/org/model?library=transformers", OnHub("org/model")),
        ("https://huggingface.co/org/model/tree/main", OnHub("org/model")),
        ("https://huggingface.co/org/m-GGUF/blob/main/sub%20dir/m.gguf", FILE),
        ("https://huggingface.co/org/m-GGUF/resolve/main/sub%20dir/m.gguf?download=true", FILE),
        ("qwen3:0.6b", QWEN),
        ("Qwen3:0.6B", QWEN),
        ("qwen3:0.6b:latest", QWEN),
        ("library/qwen3:0.6b", QWEN),
        (ADDRESS, OnWeb(ADDRESS, "a.example:8443/b c/m.gguf")),
    ],
)
def test_a_name_is_read_as_it_is_meant(name: str, source: Source) -> None:
    assert parse(name) == source


def test_a_path_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "model").mkdir(parents=True)
    (tmp_path / "qwen3:0.6b").touch()
    assert parse("org/model") == Path("org/model") and parse("qwen3:0.6b") == Path("qwen3:0.6b")


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("/no/such", "no such folder: /no/such"),
        ("none/", "no such folder: none/"),
        ("none.gguf", "no such file: none.gguf"),
        ("org/none.GGUF", "no such file: org/none.GGUF"),
        ("llama3.2", "no such folder: llama3.2 (did you mean llama3.2:1b?)"),
        ("qwen3", "no such folder: qwen3 (did you mean qwen3:0.6b or qwen3:4b or qwen3:8b?)"),
        ("qwen3:0.5b", "no such folder: qwen3:0.5b (did you mean qwen3:0.6b or "),
        ("mistrl:7b", "no such folder: mistrl:7b (did you mean mistral:7b?)"),
        ("my-modle:1", "no such folder: my-modle:1 (did you mean my-model:1?)"),
        ("zephyr:latest", "no such folder: zephyr:latest: this is how Ollama names models; Weft wants a folder"),
        ("https://huggingface.co/org/model/tree/dev", "no model of the hub: "),
        ("https://huggingface.co/org/model/blob/main/README.md", "no model of the hub: "),
        ("https://huggingface.co/org", "no model of the hub: "),
        ("https://a.example/m.zip", "no address of a GGUF file: "),
        ("https://a.example/../../m.gguf", "no address of a GGUF file: "),
        ("https://a.example/a%2Fb/m.gguf", "no address of a GGUF file: "),
        ("https://a.example/%2e%2e/m.gguf", "no address of a GGUF file: "),
        ("https://../m.gguf", "no address of a GGUF file: "),
        ("https://me:secret@a.example/m.gguf", "no address of a GGUF file: "),
        ("ftp://a.example/m.gguf", "no such file: ftp"),
    ],
)
def test_what_is_no_name_is_told_with_the_nearest_one(name: str, fault: str) -> None:
    with pytest.raises(LibraryError) as caught:
        parse(name, ["my-model:1"])
    assert str(caught.value).startswith(fault)
    assert "\n" not in str(caught.value)


def test_the_table_is_what_it_says() -> None:
    known = known_models()
    assert len(known) == 10 and len({model.name for model in known}) == 10
    for model in known:
        source = parse(model.source)
        assert isinstance(source, OnHub) and "/" in source.repository
        assert 0 < model.file_bytes < model.memory_bytes


@pytest.mark.parametrize("name", ["~nobody-of-this-name/m", "x" * 300, "x/" * 3000, f"org/{'x' * 300}:1"])
def test_what_can_be_no_path_is_told_like_any_other_name(name: str) -> None:
    """The system's error came through."""
    with contextlib.suppress(LibraryError):
        assert str(parse(name)) == name


@pytest.mark.parametrize("name", ["a" * 5000, "org/" + "a" * 93, "org/a-GGUF:" + "q" * 201, "hf.co/org/" + "a" * 300])
def test_names_that_no_disk_takes_are_refused(name: str) -> None:
    """`weft rm` and Ollama's route asked the disk, which has an error of its own for them."""
    with pytest.raises(LibraryError, match="must have at most"):
        elsewhere(name)
