import json
import pathlib
import shutil

import pytest

from tests.server.cli.test_cli import weft
from weft.server.cli import doctor
from weft.server.settings import Settings, StartError
from weft.server.supervise.checkpoint import DEMO_MODEL, check_tokenizer, resolve_template
from weft.server.text.tokenizer import Tokenizer

DEMO = Tokenizer.load(DEMO_MODEL)


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    return pathlib.Path(shutil.copytree(DEMO_MODEL, tmp_path / "m"))


def set_vocab_size(folder: pathlib.Path, vocab_size: int) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": vocab_size}))


def drop_chat_template(folder: pathlib.Path) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_the_demo_model_is_as_it_should_be() -> None:
    assert check_tokenizer(DEMO_MODEL) == []


def test_another_models_tokenizer_is_refused(folder: pathlib.Path) -> None:
    """The engine served, and refused every prompt with a token that it did not have."""
    set_vocab_size(folder, 100)
    with pytest.raises(StartError, match=r"^model: the tokenizer does not fit the model: .* vocab_size 100; take"):
        check_tokenizer(folder)
    for command in ("plan", "serve"):
        done = weft(command, str(folder), "--device", "cpu")
        assert done.returncode == 2
        assert done.stderr.startswith("weft: error: model: the tokenizer does not fit the model")
    finding = doctor._model(Settings(model=str(folder)))
    assert finding.status == "missing"
    assert finding.detail.startswith("the tokenizer does not fit the model")


def test_added_tokens_that_the_model_lacks_are_named(folder: pathlib.Path) -> None:
    """Fine-tuned models have them, and mostly do without."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    model_vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    added = {"id": max(DEMO.vocab_size, model_vocab_size), "content": "[PAD]", "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for number in range(len(tokenizer["model"]["vocab"]), added["id"]):  # ids must be without a gap
        if all(token["id"] != number for token in tokenizer["added_tokens"]):
            tokenizer["added_tokens"].append(flags | {"id": number, "content": f"<{number}>", "special": True})
    tokenizer["added_tokens"].append(flags | added)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert check_tokenizer(folder) == ["the model has no token [PAD]: prompts with it are refused"]


def test_a_missing_chat_template_is_said(folder: pathlib.Path) -> None:
    drop_chat_template(folder)
    note = "this model has no chat template: use /v1/completions, or name one with --chat-template"
    assert check_tokenizer(folder) == [note]
    finding = doctor._model(Settings(model=str(folder)))
    assert (finding.status, finding.detail) == ("note", f"{folder}: {note}")


@pytest.mark.parametrize("declared", ["{% if %}", "{{ a | nosuch }}", [{}], [1]])
def test_a_broken_chat_template_is_said_with_its_remedy(folder: pathlib.Path, declared: object) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": declared}))
    [note] = check_tokenizer(folder)
    assert "template" in note
    assert note.endswith(": use /v1/completions, or name another template with --chat-template")


def test_a_chat_template_of_the_settings_stands_for_the_missing_one(folder: pathlib.Path) -> None:
    drop_chat_template(folder)
    file = folder / "mine.jinja"
    file.write_text("{{ messages[0].content }}")
    assert check_tokenizer(folder, template=file) == []
    assert resolve_template(str(file)) == file.resolve()


def test_a_chat_template_of_the_settings_must_be_one(tmp_path: pathlib.Path) -> None:
    with pytest.raises(StartError, match=r"^chat_template: \S*none.jinja cannot be read: No such file or directory$"):
        resolve_template(str(tmp_path / "none.jinja"))
    with pytest.raises(StartError, match=r"^models: a: chat_template: .* cannot be read: Is a directory$"):
        resolve_template(str(tmp_path), "models: a")
    (tmp_path / "broken.jinja").write_text("a\n{% if %}")
    with pytest.raises(StartError, match=r"broken\.jinja: the chat template is invalid at line 2"):
        resolve_template(str(tmp_path / "broken.jinja"))


@pytest.mark.parametrize(
    "change",
    [
        {"architectures": ["LlamaModel"]},
        {"architectures": ["LlamaForSequenceClassification"]},
        {"classifier_from_token": ["no", "yes"]},
    ],
)
def test_nothing_is_said_of_templates_where_a_model_writes_no_text(
    folder: pathlib.Path, change: dict[str, object]
) -> None:
    drop_chat_template(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    assert check_tokenizer(folder) == []
    assert len(check_tokenizer(folder, "generate")) == 1


def test_nothing_is_said_of_templates_where_vectors_are_asked_of_a_model(folder: pathlib.Path) -> None:
    drop_chat_template(folder)
    assert check_tokenizer(folder, "embed") == []
    (folder / "modules.json").write_text('[{"type": "sentence_transformers.models.Transformer", "path": ""}]')
    assert check_tokenizer(folder) == []


@pytest.mark.parametrize(
    ("model", "fault"),
    [
        ("phi9:3b", "Weft wants a folder with config.json and safetensors, a GGUF file, or a hub id"),
        ("/no/such/file.gguf", "no such file: /no/such/file.gguf"),
    ],
)
def test_the_doctor_says_what_serve_says(model: str, fault: str) -> None:
    finding = doctor._model(Settings(model=model))
    assert finding.status == "missing"
    assert fault in finding.detail


def test_the_doctor_fetches_nothing() -> None:
    finding = doctor._model(Settings(model="https://a.example/m.gguf"))
    assert (finding.status, finding.advice) == ("note", "weft pull fetches it")


def test_what_is_broken_is_left_to_who_reads_it(folder: pathlib.Path) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "tokenizer_config.json").write_text("{")
    assert check_tokenizer(folder) == []
    (folder / "tokenizer.json").write_text("{}")
    assert check_tokenizer(folder) == []
