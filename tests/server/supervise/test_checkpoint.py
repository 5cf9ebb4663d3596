import contextlib
import os
import pathlib
import shutil
import socket
import threading
import time
from collections.abc import Iterable
from functools import partial
from typing import Any

import httpx
import huggingface_hub
import pytest
from gguf import GGMLQuantizationType as Kind
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils._paths import filter_repo_objects

from tests.checkpoints import Checkpoint
from tests.gguf_files import write_model
from weft.server.cli import doctor
from weft.server.settings import Settings, StartError
from weft.server.supervise import checkpoint

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


@pytest.fixture
def gguf_file(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """One that can be served, but for its weights."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sizes = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    file, _ = write_model(tmp_path / "my-model", "qwen2", Checkpoint("qwen2", sizes), lambda name: Kind.Q8_0)
    return file.rename(file.with_name("qwen-Q8_0.gguf"))


def test_a_gguf_file_gets_a_folder_until_it_changes(gguf_file: pathlib.Path) -> None:
    folder = checkpoint.resolve(str(gguf_file))
    assert folder == checkpoint.resolve(str(gguf_file.parent)) and folder.name == "qwen-Q8_0"
    assert checkpoint.served_name(str(gguf_file)) == "qwen-Q8_0"
    finding = doctor._model(Settings(model=str(gguf_file)))
    assert finding.status == "note" and "no chat template" in finding.detail
    stamp = (folder / "config.json").stat().st_mtime_ns
    assert checkpoint.resolve(str(gguf_file)) == folder and (folder / "config.json").stat().st_mtime_ns == stamp
    os.utime(gguf_file)
    other = checkpoint.resolve(str(gguf_file))
    assert other != folder and other.is_dir()


def test_a_gguf_file_that_cannot_be_served_is_one_line(gguf_file: pathlib.Path) -> None:
    def refused(model: object) -> str:
        with pytest.raises(StartError) as caught:
            checkpoint.resolve(str(model))
        return str(caught.value)

    whole = gguf_file.read_bytes()
    shutil.copy(gguf_file, gguf_file.with_name("other.gguf"))
    assert refused(gguf_file.parent).endswith("models are called Q4_K_M; there are: other, qwen-Q8_0")
    assert refused("none.gguf") == "model: no such file: none.gguf"
    for old, new, fault in (
        (b"GGUF", b"GGML", f"model: {gguf_file}: qwen-Q8_0.gguf is no GGUF file"),
        (b"qwen2", b"newer", "GGUF files of architecture newer are not supported (supported: llama, qwen2, "),
        (b"tokenizer.ggml.tokens", b"tokenizer.ggml.takens", "the file has no tokenizer ("),
        (b"qwen2.block_count", b"qwen2.black_count", "the file lacks qwen2.block_count"),
        (b"token_embd", b"token_embx", "the file has no embedding (token_embd.weight)"),
    ):
        gguf_file.write_bytes(whole.replace(old, new, 1))
        assert fault in refused(gguf_file)
    gguf_file.write_bytes(whole.replace(b"block_count\4\0\0\0\1", b"block_count\4\0\0\0\xff"))
    assert "block_count is 255, and the file has 15 tensors" in refused(gguf_file)
    gguf_file.write_bytes(whole[:-1000])
    assert "qwen-Q8_0.gguf is truncated: tensor " in refused(gguf_file)


LISTED = [
    *("README.md", "m-Q8_0.gguf", "m-Q4_K_M.gguf", "m-UD-Q4_K_XL.gguf", "mmproj-m-Q4_K_M.gguf", "m.imatrix.gguf"),
    *(f"BF16/m-BF16-{index:05}-of-00002.gguf" for index in (1, 2)),
]


@pytest.mark.parametrize(
    ("tag", "chosen"),
    [
        (None, ["m-Q4_K_M.gguf"]),
        ("q8_0", ["m-Q8_0.gguf"]),
        ("UD-Q4_K_XL", ["m-UD-Q4_K_XL.gguf"]),
        ("m-Q8_0.gguf", ["m-Q8_0.gguf"]),
        ("BF16", [f"BF16/m-BF16-{index:05}-of-00002.gguf" for index in (1, 2)]),
        ("Q4", "no models are called Q4; there are: BF16/m-BF16, m-Q4_K_M, m-Q8_0, m-UD-Q4_K_XL"),
    ],
)
def test_one_model_of_a_repository_is_fetched(
    gguf_file: pathlib.Path, monkeypatch: pytest.MonkeyPatch, tag: str | None, chosen: list[str] | str
) -> None:
    model, asked = "org/m-GGUF" + f":{tag}" * bool(tag), list[object]()

    def download(repo_id: str, **options: object) -> str:
        if options.get("local_files_only"):
            raise LocalEntryNotFoundError("not in the cache")
        asked.extend(kept(LISTED, options))
        for name in asked:
            (gguf_file.parent / str(name)).parent.mkdir(exist_ok=True)
            shutil.copy(gguf_file, gguf_file.parent / str(name))
        return str(gguf_file.parent)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(checkpoint, "_listed", lambda repository: LISTED)
    if isinstance(chosen, str):
        with pytest.raises(StartError, match=f"^model: org/m-GGUF: {chosen}$"):
            checkpoint.resolve(model)
    else:
        with contextlib.suppress(StartError):  # two copies are no parts
            checkpoint.resolve(model)
        assert asked == chosen


def test_a_model_in_the_cache_needs_no_network(gguf_file: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = gguf_file.parent.parent / "hub"
    snapshot = hub / "models--org--m-GGUF" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (hub / "models--org--m-GGUF" / "refs").mkdir()
    (hub / "models--org--m-GGUF" / "refs" / "main").write_text("0123")
    shutil.copy(gguf_file, snapshot)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", partial(huggingface_hub.snapshot_download, cache_dir=hub))
    monkeypatch.setattr(checkpoint, "_listed", None)
    assert checkpoint.resolve("org/m-GGUF:Q8_0").name == "qwen-Q8_0"

    def unreachable(repository: str) -> list[str]:
        raise OSError("offline")

    monkeypatch.setattr(checkpoint, "_listed", unreachable)
    assert checkpoint.resolve("org/m-GGUF").name == "qwen-Q8_0"
    with pytest.raises(StartError, match=r"^model: org/m-GGUF: download failed: offline$"):
        checkpoint.resolve("org/m-GGUF:Q6_K")
    monkeypatch.setattr(httpx, "head", lambda address, **options: httpx.Response(503))
    details = [doctor._model(Settings(model=f"org/m-GGUF:{tag}")).detail for tag in ("Q8_0", "Q6_K")]
    assert details == ["org/m-GGUF:Q8_0 is in the cache; the hub says 503", "org/m-GGUF:Q6_K: the hub answers 503"]


def test_a_hub_that_cannot_be_reached_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a minute of retries ended in a traceback."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
    began = time.monotonic()
    with pytest.raises(StartError, match=r"^model: org/m-GGUF: not in the cache, and the hub cannot be reached \("):
        checkpoint.resolve("org/m-GGUF:Q6_K")
    assert time.monotonic() - began < 10.0


def test_what_is_in_the_cache_does_not_decide_which_model_is_meant(
    gguf_file: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After `org/m-GGUF:Q8_0`, `org/m-GGUF` was that file, and not its Q4_K_M."""
    shutil.copy(gguf_file, gguf_file.with_name("qwen-Q4_K_M.gguf"))
    others = gguf_file.parent.parent / "others"
    others.mkdir()
    shutil.copy(gguf_file, others)

    def download(repo_id: str, **options: object) -> str:
        return str(others if options.get("local_files_only") else gguf_file.parent)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(checkpoint, "_listed", lambda repository: ["qwen-Q4_K_M.gguf", "qwen-Q8_0.gguf"])
    assert checkpoint.resolve("org/m-GGUF").name == "qwen-Q4_K_M"


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
    assert checkpoint.find(Settings(lora={"a": "org/lora"}), is_plan=True).keys() == {
        "model",
        "speculative",
        "chat_template",
    }
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


@pytest.mark.parametrize("hung", ["is_dir", "resolve", "stat"])
def test_a_disk_that_hangs_does_not_hold_up_the_start(
    hung: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`weft serve` waited for ever, without a word, whatever it asked of the folder of an adapter."""
    answers, real = threading.Event(), getattr(pathlib.Path, hung)

    def waits(path: pathlib.Path, *args: Any, **more: Any) -> Any:
        if path.is_relative_to(tmp_path) and threading.current_thread() is not threading.main_thread():
            answers.wait(30)
        return real(path, *args, **more)

    monkeypatch.setattr(pathlib.Path, hung, waits)
    monkeypatch.setattr(checkpoint, "FOLDER_S", 0.1)
    with pytest.raises(StartError, match=f"^lora: a: the disk of {tmp_path} does not answer within 0.1 s$"):
        checkpoint.find(Settings(lora={"a": str(tmp_path)}))
    answers.set()
