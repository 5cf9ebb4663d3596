import contextlib
import json
import os
import pathlib
import shutil
import socket
import threading
import time
from typing import Any

import httpx
import pytest
from gguf import GGMLQuantizationType as Kind
from huggingface_hub import constants

from tests.checkpoints import Checkpoint
from tests.gguf_files import write_model
from tests.hub_mirror import Mirror
from weft.server.cli import doctor
from weft.server.settings import Settings, StartError
from weft.server.supervise import checkpoint

CONFIG = b'{"architectures": ["LlamaForCausalLM"]}'


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
    assert checkpoint.resolve_draft("mtp") == "mtp"
    assert checkpoint.resolve_draft(str(folder)) == str(folder)
    with pytest.raises(StartError, match=r"^speculative: no such folder: /no/where$"):
        checkpoint.resolve_draft("/no/where")


def test_an_eagle_head_drafts_and_is_no_model(tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}')
    assert checkpoint.resolve_draft(str(tmp_path)) == str(tmp_path)
    with pytest.raises(StartError, match=r"^model: architecture LlamaForCausalLMEagle3 is not supported"):
        checkpoint.resolve(str(tmp_path))


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


def fetched(hub: Mirror) -> list[str]:
    """The files that were asked for since the last call."""
    asked = [path.partition("/resolve/")[2].partition("/")[2] for _, path, _ in hub.asked if "/resolve/" in path]
    hub.asked.clear()
    return asked


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
    gguf_file: pathlib.Path, hub: Mirror, tag: str | None, chosen: list[str] | str
) -> None:
    hub.repositories["org/m-GGUF"] = {name: gguf_file.read_bytes() + name.encode() for name in LISTED}
    model = "org/m-GGUF" + f":{tag}" * bool(tag)
    if isinstance(chosen, str):
        with pytest.raises(StartError, match=f"^model: org/m-GGUF: {chosen}$"):
            checkpoint.resolve(model)
    else:
        with contextlib.suppress(StartError):  # two copies are no parts
            checkpoint.resolve(model, pictures=True)
        assert fetched(hub) == [*chosen, "mmproj-m-Q4_K_M.gguf"]


def test_a_model_in_the_cache_needs_no_network(
    gguf_file: pathlib.Path, hub: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repositories["org/m-GGUF"] = {gguf_file.name: gguf_file.read_bytes()}
    checkpoint.resolve("org/m-GGUF:Q8_0")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert checkpoint.resolve("org/m-GGUF:Q8_0").name == checkpoint.resolve("org/m-GGUF").name == "qwen-Q8_0"
    with pytest.raises(StartError, match=r"^model: org/m-GGUF: not in the cache, and HF_HUB_OFFLINE forbids to ask"):
        checkpoint.resolve("org/m-GGUF:Q6_K")
    monkeypatch.setattr(httpx, "head", lambda address, **options: httpx.Response(503))
    details = [doctor._model(Settings(model=f"org/m-GGUF:{tag}")).detail for tag in ("Q8_0", "Q6_K")]
    assert details == ["org/m-GGUF:Q8_0 is in the cache; the hub says 503", "org/m-GGUF:Q6_K: the hub answers 503"]


def test_a_hub_that_cannot_be_reached_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a minute of retries ended in a traceback."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
    began = time.monotonic()
    for model in ("org/m-GGUF:Q6_K", "org/model"):
        with pytest.raises(StartError, match=r"^model: org/m.*: not in the cache, and the hub cannot be reached \("):
            checkpoint.resolve(model)
    assert time.monotonic() - began < 10.0


def test_what_is_in_the_cache_does_not_decide_which_model_is_meant(gguf_file: pathlib.Path, hub: Mirror) -> None:
    """After `org/m-GGUF:Q8_0`, `org/m-GGUF` was that file, and not its Q4_K_M."""
    data = gguf_file.read_bytes()
    hub.repositories["org/m-GGUF"] = {"qwen-Q8_0.gguf": data, "qwen-Q4_K_M.gguf": data}
    assert checkpoint.resolve("org/m-GGUF:Q8_0").name == "qwen-Q8_0"
    assert checkpoint.resolve("org/m-GGUF").name == "qwen-Q4_K_M"


@pytest.mark.parametrize("model", ["phi9:3b", "library/phi9:latest", "a/b/phi9:3b"])
def test_a_name_of_ollamas_is_known_as_such(model: str) -> None:
    with pytest.raises(
        StartError, match=rf"^model: no such folder: {model}: .*Ollama.* or a name that `weft pull` lis"
    ):
        checkpoint.resolve(model)


def test_weights_of_a_model_that_the_engine_does_not_have_are_not_downloaded(hub: Mirror) -> None:
    config = b'{"architectures": ["NewForCausalLM"], "model_type": "new"}'
    hub.repositories["org/new"] = {"config.json": config, "a.safetensors": b"a", "tokenizer.json": b"t"}
    for model_impl, fault in (
        ("auto", r"is not supported: it has no native"),
        ("native", r"is not supported natively \(`weft models --architectures`"),
    ):
        with pytest.raises(StartError, match=rf"^speculative: architecture NewForCausalLM {fault}"):
            checkpoint.resolve_draft("org/new", model_impl=model_impl)
    assert set(fetched(hub)) == {"config.json"}


def test_adapters_are_folders_or_downloaded(folder: pathlib.Path, hub: Mirror) -> None:
    hub.repositories["org/lora"] = {"README.md": b"r", "adapter_config.json": b"{}", "adapter_model.safetensors": b"a"}
    for source, fault in (
        (str(folder), f"no adapter_config.json in {folder}"),
        (str(folder / "no"), f"no such folder: {folder / 'no'}"),
    ):
        with pytest.raises(StartError, match=f"^lora: a: {fault}$"):
            checkpoint.find(Settings(lora={"a": source}))
    assert checkpoint.find(Settings(lora={"a": "org/lora"}), is_plan=True).keys() == {
        "model",
        "speculative",
        "chat_template",
    }
    assert fetched(hub) == []
    found = checkpoint.find(Settings(lora={"a": "org/lora"}))["lora"]
    assert sorted(fetched(hub)) == ["adapter_config.json", "adapter_model.safetensors"]
    assert checkpoint.find(Settings(lora={"a": "org/lora"}))["lora"] == found and fetched(hub) == []
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / name).touch()
    for source in (str(folder), os.path.relpath(folder)):
        assert checkpoint.find(Settings(lora={"a": source}))["lora"] == {"a": str(folder)}


def test_pickled_weights_are_fetched_only_where_there_are_no_others(hub: Mirror) -> None:
    files = {"config.json": CONFIG, "tokenizer.json": b"t", "modeling.py": b"m", "pytorch_model.bin": b"p"}
    files |= {"chat_template.jinja": b"c", "x/config.json": b"x", "consolidated.safetensors": b"s"}
    hub.repositories |= {"org/old": files, "org/new": {**files, "a.safetensors": b"a"}}
    assert checkpoint.resolve("org/old", is_plan=True) == checkpoint.resolve("org/old", is_plan=True)
    assert fetched(hub) == ["config.json"]
    wanted = {"tokenizer.json", "chat_template.jinja"}
    for model, weights in (("org/old", "pytorch_model.bin"), ("org/new", "a.safetensors")):
        checkpoint.resolve(model)
        assert {*fetched(hub)} - {"config.json"} == {*wanted, weights}
        assert checkpoint.served_name(model) == checkpoint.served_name(f"https://huggingface.co/{model}") == model


def test_a_model_that_is_too_large_is_told_before_its_weights_are_fetched(hub: Mirror) -> None:
    sizes = {"hidden_size": 65536, "intermediate_size": 262144, "num_hidden_layers": 200, "vocab_size": 1000}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_attention_heads": 512,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 9,
    }
    hub.repositories["org/huge"] = {"config.json": json.dumps(config | sizes).encode(), "a.safetensors": b"a"}
    told = r"^model: org/huge needs [\d.,]+ [GT]B of memory, and .* are free: take a smaller model, or one in fewer"
    with pytest.raises(StartError, match=told):
        checkpoint.find(Settings(model="org/huge", device="cpu", lora={"a": "org/lora"}))
    assert fetched(hub) == ["config.json"]


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
