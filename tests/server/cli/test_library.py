"""What the commands of the library print."""

import os
import pathlib
import shutil
from collections.abc import Callable

import pytest
from gguf import GGMLQuantizationType as Kind

from tests.chat_templates_for_tests import QWEN3
from tests.checkpoints import Checkpoint
from tests.gguf_files import write_model
from tests.hub_mirror import Mirror
from weft.server.cli import library
from weft.server.library import library as models
from weft.server.library.library import shown_progress
from weft.server.library.names import known_models
from weft.server.settings import Settings, StartError
from weft.server.supervise import checkpoint

Rows = Callable[[], list[list[str]]]


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Rows:
    return lambda: [line.split() for line in capsys.readouterr().out.splitlines()]


def test_the_table_has_what_fits_first(hub: Mirror, printed: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sysconf", lambda name: 1_400_000_000 if name == "SC_PHYS_PAGES" else 1)
    library.show_known()
    rows = [row for row in printed() if row and row[0] in {known.name for known in known_models()}]
    fitting = ["all-minilm", "smollm2:360m", "qwen3:0.6b"]
    assert [row[0] for row in rows][:3] == fitting and len(rows) == len(known_models())
    assert [row[0] for row in rows if row[-3:] == ["too", "large", "here"]] == [row[0] for row in rows[3:]]


def test_lists_and_shows_a_model(
    hub: Mirror, printed: Rows, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    file, _ = write_model(tmp_path, "qwen2", Checkpoint("qwen2", sizes), lambda name: Kind.Q8_0, chat_template=QWEN3)
    hub.repositories["Qwen/Qwen3-0.6B-GGUF"] = {"Qwen3-0.6B-Q8_0.gguf": file.read_bytes(), "b-Q4_0.gguf": b"GGUF"}
    library.show_list()
    assert printed() == [
        ["the", "library", "is", "empty;", "`weft", "pull`", "lists", "what", "could", "be", "in", "it"]
    ]
    library.pull("qwen3:0.6b")
    assert printed()[0][:3] == ["qwen3:0.6b", "is", "here:"]
    library.show_list()
    assert printed()[1][0::3] == ["qwen3:0.6b", "gguf"]
    monkeypatch.setattr(library, "show_plan", lambda settings: 0)
    folder = str(checkpoint.resolve("qwen3:0.6b"))
    assert library.show(Settings(model=folder, served_model_name=("qwen3:0.6b",))) == 0
    rows = {row[0]: " ".join(row[1:]) for row in printed()}
    assert rows["files"].startswith("gguf, Q8_0, ") and rows["context"].endswith(" tokens")
    assert (rows["chat"], rows["tools"], rows["reasoning"]) == ("the template of the model", "hermes", "think")


def test_who_cannot_be_talked_to_is_told_before_a_server_starts(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library.subprocess, "Popen", None)
    folder = pathlib.Path(shutil.copytree(checkpoint.DEMO_MODEL, tmp_path / "model"))
    (folder / "chat_template.jinja").unlink()
    settings = Settings(model=str(folder), served_model_name=("m",))
    with pytest.raises(StartError, match=r"^m: this model has no chat template: .* \(WEFT_CHAT_TEMPLATE\)$"):
        library.run(settings, "m", "Hello")
    (folder / "modules.json").write_text('[{"type": "sentence_transformers.models.Transformer", "path": ""}]')
    with pytest.raises(StartError, match=r"^m is no model to talk to: `weft serve m` serves its vectors$"):
        library.run(settings, "m", "Hello")


def test_lines_tell_how_far_a_download_is(hub: Mirror) -> None:
    hub.repositories["org/m-GGUF"] = {"m-Q8_0.gguf": bytes(2_000_000), "README.md": b"r"}
    lines: list[str] = []
    with shown_progress(lines.append) as report:
        models.get("org/m-GGUF", report)
    name = "Fetching org/m-GGUF/m-Q8_0.gguf"
    assert lines == [f"{name}: 0 B of 2 MB", f"{name}: 2 MB of 2 MB"]
