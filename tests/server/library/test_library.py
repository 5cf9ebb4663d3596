"""The library against a mirror of the hub: what arrives, what goes wrong on the way, and what is then there."""

import fcntl
import json
import random
import resource
import shutil
import threading
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from tests.hub_mirror import Mirror
from weft.server.library import hub as hub_models
from weft.server.library import library
from weft.server.library.download import LibraryError, Remote, download
from weft.server.library.names import OnHub, models_folder, parse
from weft.server.supervise.checkpoint import served_name

TOKENIZER = {"tokenizer.json": b'{"a": 1}', "config.json": b"{}"}


def noise(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


class Seen:
    """What a download reports: the bytes that were there at the first and at the last report, by file."""

    def __init__(self) -> None:
        self.first: dict[str, int] = {}
        self.last: dict[str, int] = {}

    def __call__(self, remote: Remote, num_bytes: int) -> None:
        name = remote.name.rpartition("/")[2]
        self.first.setdefault(name, num_bytes)
        self.last[name] = num_bytes


def names() -> list[str]:
    return [entry.name for entry in library.entries()]


def test_a_checkpoint_arrives_whole_and_is_then_there_without_the_hub(hub: Mirror) -> None:
    files = {**TOKENIZER, "model.safetensors": noise(300_000), "1_Pooling/config.json": b"{}"}
    hub.repositories["org/model"] = {
        **files,
        "modeling.py": b"no",
        "onnx/config.json": b"{}",
        "pytorch_model.bin": b"p",
    }
    seen, checked = Seen(), list[list[str]]()

    def check(folder: Path) -> None:
        checked.append(sorted(file.name for file in folder.iterdir()))

    folder = library.get("org/model", seen, check)
    assert {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()} == files
    assert checked == [["config.json"]] and seen.last["model.safetensors"] == 300_000
    num_asked = len(hub.asked)
    assert library.get("org/model", seen) == folder and len(hub.asked) == num_asked
    assert names() == ["org/model"]
    assert huggingface_hub.snapshot_download(
        "org/model", local_files_only=True, cache_dir=hub_models.repository_folder("x").parent
    ) == str(folder)


def test_tokenizers_of_sentencepiece_arrive(hub: Mirror) -> None:
    """A translator had none, and was not whole."""
    names = ("source.spm", "target.spm", "vocab.json", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model")
    files = {**dict.fromkeys(names, b"t"), "config.json": b"{}", "pytorch_model.bin": noise(1000)}
    hub.repositories["org/marian"] = {**files, "other.model": b"no"}
    folder = library.get("org/marian", Seen())
    assert {file.name for file in folder.iterdir()} == files.keys()


def test_what_the_hubs_own_tools_have_fetched_is_found(hub: Mirror) -> None:
    hub.repositories["org/model"] = {**TOKENIZER, "model.safetensors": noise(50_000)}
    cache = hub_models.repository_folder("x").parent
    folder = huggingface_hub.snapshot_download("org/model", cache_dir=cache, endpoint=hub.url)
    num_asked = len(hub.asked)
    assert str(library.get("org/model", Seen())) == folder and len(hub.asked) == num_asked


@pytest.mark.parametrize("breaks", [[0.4], [0.1, 0.1, 0.4, 0.9]])
def test_a_connection_that_breaks_is_opened_again(hub: Mirror, breaks: list[float]) -> None:
    hub.repositories["org/model"] = {**TOKENIZER, "model.safetensors": noise(300_000)}
    hub.broken["model.safetensors"] = list(breaks)
    folder = library.get("org/model", Seen())
    assert (folder / "model.safetensors").read_bytes() == noise(300_000)
    starts = [int(span.removeprefix("bytes=").partition("-")[0]) for _, span in hub.contents()]
    assert starts == [0, *(int(300_000 * share) for share in breaks)]


def test_a_broken_pull_goes_on_where_it_stopped(hub: Mirror) -> None:
    hub.repositories["org/model"] = {**TOKENIZER, "model.safetensors": noise(300_000)}
    hub.broken["model.safetensors"] = [0.4] * 20
    with pytest.raises(LibraryError, match=r"cannot be fetched: .*; 120,000 of 300,000 bytes are kept, and the next"):
        library.get("org/model", Seen())
    assert names() == [] and library.find(OnHub("org/model")) is None
    hub.broken.clear()
    seen = Seen()
    folder = library.get("org/model", seen)
    assert seen.first["model.safetensors"] == 120_000 and seen.last["model.safetensors"] == 300_000
    assert (folder / "model.safetensors").read_bytes() == noise(300_000)
    assert hub.contents()[-1][1] == "bytes=120000-299999"


def test_a_damaged_file_is_thrown_away(hub: Mirror) -> None:
    """Neither of the hub's checksums is checked by its own client over plain HTTP."""
    hub.repositories["org/model"] = {**TOKENIZER, "model.safetensors": noise(300_000)}
    for name in ("tokenizer.json", "model.safetensors"):
        hub.damaged = {name}
        with pytest.raises(LibraryError, match=rf"^org/model/{name} is damaged: its checksum is not the one"):
            library.get("org/model", Seen())
        assert names() == []
    hub.damaged.clear()
    seen = Seen()
    library.get("org/model", seen)
    assert seen.first["model.safetensors"] == 0


def test_a_disk_without_room_is_told_before_anything_is_fetched(hub: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repositories["org/model-GGUF"] = {"m-Q8_0.gguf": noise(300_000)}
    usage = shutil.disk_usage("/")._replace(free=100_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(LibraryError, match=r"^org/model-GGUF needs 300 kB on the disk, and .* has 100 kB free: make"):
        library.get("org/model-GGUF", Seen())
    assert hub.contents() == []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=300_000))
    library.get("org/model-GGUF", Seen())


def test_a_disk_that_is_full_on_the_way_loses_nothing(hub: Mirror) -> None:
    """The kernel refuses to make files longer than the limit, as a full disk refuses to take more."""
    hub.repositories["org/model-GGUF"] = {"m-Q8_0.gguf": noise(300_000)}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    try:
        with pytest.raises(LibraryError, match=r"m-Q8_0.gguf cannot be written \(File too large\); what has"):
            library.get("org/model-GGUF", Seen())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert names() == []
    seen = Seen()
    assert library.get("org/model-GGUF", seen).read_bytes() == noise(300_000)
    assert 0 < seen.first["m-Q8_0.gguf"] <= 200_000


def test_one_process_fetches_a_model_and_another_waits_for_it(hub: Mirror) -> None:
    hub.repositories["org/model"] = {**TOKENIZER, "model.safetensors": noise(300_000)}
    threads = [threading.Thread(target=library.get, args=("org/model", Seen())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [name for name, _ in hub.contents()] == ["model.safetensors"]
    lock = hub_models.repository_folder("x").parent / ".locks" / "models--org--model" / "weft.lock"
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(LibraryError, match=r"^org/model is being fetched by another process$"):
            library.remove("org/model")
    library.remove("org/model")
    assert names() == []


def test_a_gguf_model_of_several_comes_and_goes_alone(hub: Mirror) -> None:
    parts = {f"BF16/m-BF16-{index:05}-of-00002.gguf": noise(30_000, index) for index in (1, 2)}
    hub.repositories["org/m-GGUF"] = {"m-Q8_0.gguf": noise(40_000, 5), "config.json": b"{}", **parts}
    assert library.get("org/m-GGUF:Q8_0", Seen()).name == "m-Q8_0.gguf"
    assert library.get("hf.co/org/m-GGUF:bf16", Seen()).name == "m-BF16-00001-of-00002.gguf"
    assert names() == ["org/m-GGUF:BF16", "org/m-GGUF:Q8_0"]
    sizes = {entry.name: (entry.facts.size_bytes, entry.facts.quantization) for entry in library.entries()}
    assert sizes == {"org/m-GGUF:BF16": (60_000, "BF16"), "org/m-GGUF:Q8_0": (40_000, "Q8_0")}
    library.remove("org/m-GGUF:BF16")
    assert names() == ["org/m-GGUF:Q8_0"]
    with pytest.raises(LibraryError, match=r"^org/m-GGUF:BF16 is not in the library"):
        library.remove("org/m-GGUF:BF16")
    assert len([*hub_models.repository_folder("org/m-GGUF").glob("blobs/*")]) == 1
    library.remove("org/m-GGUF:Q8_0")
    assert not hub_models.repository_folder("org/m-GGUF").exists()


def test_what_sees_goes_with_the_last_model_of_a_repository(hub: Mirror) -> None:
    files = {"m-Q8_0.gguf": noise(40_000, 5), "m-Q4_K_M.gguf": noise(30_000, 6), "mmproj-F16.gguf": noise(20_000, 7)}
    hub.repositories["org/m-GGUF"] = files
    for tag in ("Q8_0", "Q4_K_M"):
        model = library.get(f"org/m-GGUF:{tag}", Seen())
        assert (model.name, model.with_name("mmproj-F16.gguf").is_file()) == (f"m-{tag}.gguf", True)
    assert names() == ["org/m-GGUF:Q4_K_M", "org/m-GGUF:Q8_0"]
    library.remove("org/m-GGUF:Q4_K_M")
    assert model.with_name("mmproj-F16.gguf").is_file()
    library.remove("org/m-GGUF:Q8_0")
    assert not hub_models.repository_folder("org/m-GGUF").exists()


def test_what_sees_is_not_fetched_where_pictures_are_not_wanted(hub: Mirror) -> None:
    hub.repositories["org/m-GGUF"] = {"m-Q8_0.gguf": noise(40_000, 5), "mmproj-F16.gguf": noise(20_000, 7)}
    model = library.get("org/m-GGUF", Seen(), is_seeing=False)
    assert [each.name for each in model.parent.iterdir()] == ["m-Q8_0.gguf"]


def test_a_model_with_a_part_missing_is_not_there(hub: Mirror) -> None:
    shards = {f"model-{index:05}-of-00002.safetensors": noise(30_000, index) for index in (1, 2)}
    hub.repositories["org/model"] = {**TOKENIZER, **shards}
    folder = library.get("org/model", Seen())
    for name in [*shards, "config.json", "tokenizer.json"]:
        (folder / name).unlink()
        assert names() == [] and library.find(OnHub("org/model")) is None
        assert library.get("org/model", Seen()) == folder and names() == ["org/model"]


def test_a_newer_version_is_fetched_when_it_is_asked_for_and_half_of_it_is_not_served(hub: Mirror) -> None:
    hub.repositories["org/model"] = {**TOKENIZER, "model.safetensors": noise(300_000)}
    old = library.get("org/model", Seen())
    hub.repositories["org/model"] = {**TOKENIZER, "model.safetensors": noise(300_000, 1)}
    hub.broken["model.safetensors"] = [0.4] * 20
    with pytest.raises(LibraryError):
        library.get("org/model", Seen(), refresh=True)
    assert library.get("org/model", Seen()) == old
    hub.broken.clear()
    assert library.get("org/model", Seen(), refresh=True) != old
    assert (library.get("org/model", Seen()) / "model.safetensors").read_bytes() == noise(300_000, 1)


@pytest.mark.parametrize("name", ["/etc/passwd.json", "../../out.json", "a/../../../out.json", "a//b.json"])
def test_a_name_that_leads_out_of_the_folder_is_left_out(hub: Mirror, tmp_path: Path, name: str) -> None:
    hub.repositories["org/model"] = {**TOKENIZER, "model.safetensors": noise(30_000), name: b"out"}
    folder = library.get("org/model", Seen())
    assert {file.name for file in folder.iterdir()} == {*TOKENIZER, "model.safetensors"}
    assert not any(path.endswith(name) for _, path, _ in hub.asked)


def test_a_model_that_wants_permission_gets_the_token(hub: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repositories["org/model-GGUF"] = {"m-Q8_0.gguf": noise(30_000)}
    hub.gated = {"org/model-GGUF"}
    with pytest.raises(LibraryError, match="permission is needed: set HF_TOKEN"):
        library.get("org/model-GGUF", Seen())
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert library.get("org/model-GGUF", Seen()).is_file()


def test_offline_nobody_is_asked(hub: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repositories["org/model-GGUF"] = {"m-Q8_0.gguf": noise(30_000)}
    library.get("org/model-GGUF", Seen())
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.asked.clear()
    assert library.get("org/model-GGUF", Seen()).is_file()  # the only one that is there
    with pytest.raises(LibraryError, match=r"^org/other: not in the cache, and HF_HUB_OFFLINE forbids to ask the hub$"):
        library.get("org/other", Seen())
    assert hub.asked == []


def test_a_file_of_a_web_server_lies_under_its_address(hub: Mirror) -> None:
    parts = {f"m-Q8_0-{index:05}-of-00002.gguf": noise(60_000, index) for index in (1, 2)}
    hub.repositories["some/where"] = {**parts, "one.gguf": noise(60_000, 3)}
    address = f"{hub.url}/cdn/some/where"
    hub.broken["one.gguf"] = [0.4] * 20
    with pytest.raises(LibraryError):
        library.get(f"{address}/one.gguf", Seen())
    hub.broken.clear()
    seen = Seen()
    place = f"127.0.0.1:{hub.port}/cdn/some/where"
    file = library.get(f"{address}/one.gguf?download=true", seen)
    assert file == models_folder() / place / "one.gguf" and file.read_bytes() == noise(60_000, 3)
    assert seen.first["one.gguf"] == 24_000
    assert library.get(f"{address}/m-Q8_0-00001-of-00002.gguf", Seen()).read_bytes() == noise(60_000, 1)
    assert names() == [f"{place}/m-Q8_0-00001-of-00002.gguf", f"{place}/one.gguf"]
    num_asked = len(hub.asked)
    for name in names():
        assert library.get(name, Seen()).is_file() and len(hub.asked) == num_asked
        assert library.find(parse(name)) == models_folder() / name  # `weft show` asks so, and did not know these names
        assert served_name(name) == Path(name).name.removesuffix(".gguf").removesuffix("-00001-of-00002")
        library.remove(name)
    assert names() == [] and [each.name for each in models_folder().iterdir()] == [".locks"]


def test_a_model_of_the_web_that_is_not_whole_is_fetched_again_by_its_address(hub: Mirror) -> None:
    parts = {f"m-Q8_0-{index:05}-of-00002.gguf": noise(60_000, index) for index in (1, 2)}
    hub.repositories["some/where"] = dict(parts)
    first, last = (library.get(f"{hub.url}/cdn/some/where/{name}", Seen()).with_name(name) for name in parts)
    last.unlink()
    place = first.relative_to(models_folder()).as_posix()
    with pytest.raises(LibraryError, match=f"^{place} is not there as a whole; fetch it again by its address$"):
        library.get(place, Seen())
    library.remove(place)
    assert not first.exists()


@pytest.mark.parametrize("written", ["refs", "snapshots"])
def test_a_cache_that_cannot_be_written_is_told(hub: Mirror, written: str) -> None:
    """Only what arrived was told of; the system's error came through for all else."""
    hub.repositories["org/model"] = {**TOKENIZER, "model.safetensors": noise(30_000)}
    folder = hub_models.repository_folder("org/model")
    folder.mkdir(parents=True)
    (folder / written).touch()
    with pytest.raises(LibraryError, match=r"^org/model: the library cannot be written: .*Not a directory|File exists"):
        library.get("org/model", Seen())


@pytest.mark.parametrize("name", ["org/a..b", "org/a--b", "org/model-"])
def test_a_name_that_the_hub_cannot_have_is_told(hub: Mirror, name: str) -> None:
    """The error of the hub's client came through."""
    with pytest.raises(LibraryError, match=f"^{name}: download failed: Repo id|{name}: download failed: Cannot have"):
        library.get(name, Seen())


@pytest.mark.parametrize("files", [{}, {"files": None}, {"files": [1, "none.gguf"]}, {"files": "m.gguf"}])
def test_a_configuration_that_names_no_files_hides_no_other_model(hub: Mirror, files: dict[str, Any]) -> None:
    """The whole list failed for it."""
    config = json.dumps({"quantization_config": {"quant_method": "gguf", **files}}).encode()
    hub.repositories["org/odd"] = {**TOKENIZER, "config.json": config, "model.safetensors": noise(30_000)}
    hub.repositories["org/model"] = {**TOKENIZER, "model.safetensors": noise(30_000)}
    for name in hub.repositories:
        library.get(name, Seen())
    assert names() == ["org/model", "org/odd"]


def test_what_is_longer_than_its_server_said_is_asked_for_anew(hub: Mirror, tmp_path: Path) -> None:
    """What had arrived was kept, so that every further try failed without asking."""
    hub.repositories["some/where"] = {"one.gguf": noise(60_000)}
    url, file = f"{hub.url}/cdn/some/where/one.gguf", tmp_path / "one.gguf"
    remote = Remote("one.gguf", url, 50_000, "etag:", {"If-Range": '"another"'})
    for num_tries in (1, 2):
        with pytest.raises(LibraryError, match=r"^one.gguf is longer than its server said$"):
            download({file: remote}, "one", Seen())
        assert len(hub.asked) == num_tries and not file.exists()


def test_what_has_changed_on_a_web_server_is_fetched_anew(hub: Mirror) -> None:
    hub.repositories["some/where"] = {"one.gguf": noise(60_000)}
    hub.broken["one.gguf"] = [0.4] * 20
    with pytest.raises(LibraryError):
        library.get(f"{hub.url}/cdn/some/where/one.gguf", Seen())
    hub.repositories["some/where"] = {"one.gguf": noise(60_000, 1)}
    hub.broken.clear()
    assert library.get(f"{hub.url}/cdn/some/where/one.gguf", Seen()).read_bytes() == noise(60_000, 1)


def test_a_name_that_the_hub_does_not_have_gets_the_nearest(hub: Mirror) -> None:
    with pytest.raises(
        LibraryError, match=r"^Qwen/Qwen3-4B-GUF: no such model on the hub \(did you mean Qwen/Qwen3-4B"
    ):
        library.get("Qwen/Qwen3-4B-GUF", Seen())
    hub.repositories["my-own/model"] = {**TOKENIZER, "model.safetensors": noise(30_000)}
    library.get("my-own/model", Seen())
    with pytest.raises(LibraryError, match=r"^my-own/modle: no such model on the hub \(did you mean my-own/model\?\)"):
        library.get("my-own/modle", Seen())


def test_files_of_the_user_are_not_removed(hub: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An absolute path was taken for a place in the library."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "mine.gguf"
    file.write_bytes(b"GGUF")
    models_folder().mkdir(parents=True)
    outward = Path("..") / ".." / ".." / "mine.gguf"
    assert (models_folder() / outward).exists()
    for name in (str(file), "mine.gguf", str(outward), str(tmp_path)):
        with pytest.raises(LibraryError, match=r"no model of the library|no such file"):
            library.remove(name)
        assert file.is_file()
