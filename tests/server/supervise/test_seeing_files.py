"""Which folder a GGUF model gets that an mmproj file lies beside, by the settings, and what is said if none fits."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from tests.mmproj_files import WITH_PROCESSORS, write_halves, write_mmproj
from weft.server.settings import Settings, StartError
from weft.server.supervise import checkpoint
from weft.server.supervise.memory_shares import read_memories


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model.gguf and mmproj.gguf."""
    folder = tmp_path_factory.mktemp("files")
    write_halves("idefics3", folder)
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def found(model: Path, **settings: Any) -> tuple[str, Settings]:
    """The architecture of what would be served, and the settings with its folder."""
    given = Settings(model=str(model), served_model_name=("m",), **settings)
    there = given.model_copy(update=checkpoint.find(given))
    assert there.model is not None
    return json.loads((Path(there.model) / "config.json").read_text())["architectures"][0], there


def test_one_beside_a_model_is_used_if_pictures_are_wanted(files: Path) -> None:
    seeing, settings = found(files / "model.gguf", pictures=True, device="cpu")
    text, blind = found(files / "model.gguf", pictures=False, device="cpu")
    assert (seeing, text) == ("Idefics3ForConditionalGeneration", "LlamaForCausalLM")
    sizes = [read_memories(each, ["m"])["m"].weights_bytes for each in (settings, blind)]
    assert sizes[0] > sizes[1] + (256 << 20)


def test_a_setting_names_one(files: Path, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").symlink_to(files / "model.gguf")
    assert found(tmp_path / "model.gguf", pictures=True)[0] == "LlamaForCausalLM"
    named = str(files / "mmproj.gguf")
    assert found(tmp_path / "model.gguf", pictures=True, mmproj=named)[0] == "Idefics3ForConditionalGeneration"


def test_one_that_does_not_fit_is_named(files: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Named by the setting it is an error; found by its name, it leaves the text half alone."""
    (tmp_path / "model.gguf").symlink_to(files / "model.gguf")
    write_mmproj(
        files / "whole", tmp_path / "mmproj.gguf", WITH_PROCESSORS["idefics3"], metadata={"projector_type": "ldp"}
    )
    with caplog.at_level(logging.WARNING):
        assert found(tmp_path / "model.gguf", pictures=True)[0] == "LlamaForCausalLM"
    fault = "mmproj.gguf: projectors of type ldp are not supported (supported: mlp, idefics3"
    assert f"only text is served: {fault}" in caplog.text
    with pytest.raises(StartError) as caught:
        found(tmp_path / "model.gguf", pictures=True, mmproj=str(tmp_path / "mmproj.gguf"))
    assert str(caught.value).startswith(f"model: {tmp_path / 'model.gguf'}: {fault}")


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"mmproj": "none.gguf", "pictures": True}, r"^mmproj: no such file: none\.gguf$"),
        (
            {"mmproj": "m.gguf", "pictures": False},
            r"^mmproj: m\.gguf needs a GGUF file as MODEL, and the setting pictures$",
        ),
    ],
)
def test_a_setting_that_does_nothing_is_refused(files: Path, settings: dict[str, Any], fault: str) -> None:
    with pytest.raises(StartError, match=fault):
        found(files / "model.gguf", **settings)


def test_a_model_that_is_no_gguf_file_takes_none(files: Path) -> None:
    for model, shown in ((str(files / "whole"), f"{files / 'whole'} is none"), (None, "the setting pictures")):
        with pytest.raises(StartError, match=rf"^mmproj: m\.gguf needs a GGUF file as MODEL, and {shown}$"):
            checkpoint.find(Settings(model=model, pictures=True, mmproj="m.gguf"))
