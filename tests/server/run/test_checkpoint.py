import os
import pathlib
from collections.abc import Iterable

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils._paths import filter_repo_objects

from weft.server.run import checkpoint
from weft.server.settings import Settings, StartError

FILES = ["config.json", "a.safetensors", "chat_template.jinja", "pytorch_model.bin", "modeling.py", "x/config.json"]


def kept(files: list[str], asked: dict[str, object]) -> Iterable[str]:
    """The files that a download with these options fetches."""
    allow, ignore = asked["allow_patterns"], asked["ignore_patterns"]
    return filter_repo_objects(files, allow_patterns=allow, ignore_patterns=ignore)  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "my-model"
    path.mkdir()
    (path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    return path


def test_folder_is_made_absolute(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    assert checkpoint.resolve("my-model") == folder
    assert checkpoint.served_name("./my-model") == "my-model"


def test_a_draft_model_is_resolved_and_a_fault_names_its_setting(folder: pathlib.Path) -> None:
    assert checkpoint.resolve_draft(None) is None
    assert checkpoint.resolve_draft("ngram") == "ngram"
    assert checkpoint.resolve_draft(str(folder)) == str(folder)
    with pytest.raises(StartError, match=r"^speculative: no such folder: /no/where$"):
        checkpoint.resolve_draft("/no/where")


def test_default_is_the_demo_model() -> None:
    assert checkpoint.served_name(None) == "weft-demo"
    assert checkpoint.DEMO_MODEL.parent == pathlib.Path(checkpoint.__file__).parents[1]


@pytest.mark.parametrize("model", ["/no/such/folder", "./none", "none/", "a/b/c", "-x"])
def test_missing_folder_is_not_looked_for_on_the_hub(model: str) -> None:
    with pytest.raises(StartError, match=f"^model: no such folder: {model}$"):
        checkpoint.resolve(model)


def test_folder_without_config_is_no_checkpoint(tmp_path: pathlib.Path) -> None:
    with pytest.raises(StartError, match=r"^model: no config.json in "):
        checkpoint.resolve(str(tmp_path))


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        ('{"architectures": ["LlamaForCausalLM"], "quantization_config": {"quant_method": "hqq"}}', "quantized"),
        ("{}", "names no architecture"),
        ("[", "not readable as JSON"),
    ],
)
def test_a_model_that_the_engine_does_not_have_is_refused_at_once(
    folder: pathlib.Path, config: str, fault: str
) -> None:
    """The engine said so after it had started, seconds later."""
    (folder / "config.json").write_text(config)
    for is_plan in (False, True):
        with pytest.raises(StartError) as caught:
            checkpoint.resolve(str(folder), is_plan=is_plan)
        assert str(caught.value).startswith("model: ")
        assert fault in str(caught.value)
    with pytest.raises(StartError, match=r"^speculative: "):
        checkpoint.resolve_draft(str(folder))


def test_gguf_is_named_whatever_stands_for_it(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "model-q4.GGUF"
    file.touch()
    wanted = "Weft wants a folder with config.json and safetensors, or a hub id such as Qwen/Qwen3-0.6B"
    for model in (str(file), str(tmp_path).replace(file.name, ""), "Qwen/Qwen3-0.6B-GGUF"):
        (tmp_path / "model.gguf").touch()
        with pytest.raises(StartError) as caught:
            checkpoint.resolve(model)
        assert str(caught.value) == f"model: {model}: GGUF files are not supported yet; {wanted}"


@pytest.mark.parametrize("model", ["qwen3:0.6b", "library/llama3.2:latest", "hf.co/org/name-GGUF:Q4_K_M"])
def test_a_name_of_ollamas_is_known_as_such(model: str) -> None:
    with pytest.raises(StartError, match=rf"^model: no such folder: {model}: .*Ollama.* such as Qwen/Qwen3-0\.6B$"):
        checkpoint.resolve(model)


def test_weights_of_a_model_that_the_engine_does_not_have_are_not_downloaded(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def download(repo_id: str, **options: object) -> str:
        asked.append(options["allow_patterns"])
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    (folder / "config.json").write_text('{"architectures": ["NewForCausalLM"], "model_type": "new"}')
    with pytest.raises(StartError, match=r"^model: architecture NewForCausalLM is not supported: it has no native"):
        checkpoint.resolve("org/not-cached")
    with pytest.raises(
        StartError,
        match=r"^model: architecture NewForCausalLM is not supported natively \(`weft models --architectures`",
    ):
        checkpoint.resolve("org/not-cached", model_impl="native")
    assert asked == [checkpoint.CONFIG_PATTERNS] * 2
    with pytest.raises(StartError, match=r"^speculative: architecture NewForCausalLM"):
        checkpoint.resolve_draft("org/not-cached", model_impl="native")


def test_adapters_are_folders_or_downloaded(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def download(repo_id: str, **options: object) -> str:
        asked.append((repo_id, options["allow_patterns"]))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    for source, fault in (
        (str(folder), f"no adapter_config.json in {folder}"),
        (str(folder / "no"), f"no such folder: {folder / 'no'}"),
        ("org/lora", f"no adapter_config.json in {folder}"),
    ):
        with pytest.raises(StartError, match=f"^lora: a: {fault}$"):
            checkpoint.find(Settings(lora={"a": source}))
    assert checkpoint.find(Settings(lora={"a": "org/lora"}), is_plan=True).keys() == {"model", "speculative"}
    assert asked == [("org/lora", ["adapter_config.json", "adapter_model.safetensors"])]
    for name in checkpoint.ADAPTER_PATTERNS:
        (folder / name).touch()
    for source in (str(folder), os.path.relpath(folder), "org/lora"):
        assert checkpoint.find(Settings(lora={"a": source}))["lora"] == {"a": str(folder)}


def test_hub_id_is_downloaded_without_code(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    def download(repo_id: str, **options: object) -> str:
        asked.update(options, repo_id=repo_id)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert checkpoint.resolve("org/name") == folder
    assert list(kept([*FILES, "consolidated.safetensors"], asked)) == FILES[:4]  # there are no safetensors yet
    (folder / "a.safetensors").touch()
    assert checkpoint.resolve("org/name") == folder
    assert checkpoint.served_name("org/name") == "org/name"
    assert asked["repo_id"] == "org/name"
    assert list(kept(FILES, asked)) == FILES[:3]
    assert checkpoint.resolve("org/name", is_plan=True) == folder
    assert list(kept(FILES, asked)) == FILES[:1]
    assert checkpoint.resolve_draft("org/name", is_plan=True) == str(folder)
    assert list(kept(FILES, asked)) == FILES[:1]


def test_unreachable_hub_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(repo_id: str, **_: object) -> str:
        raise LocalEntryNotFoundError("several\nlines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(StartError) as caught:
        checkpoint.resolve("org/name")
    assert str(caught.value) == "model: org/name: no such folder, not in the cache, and the hub cannot be reached"
