"""The file of kept choices: it saves time, and whatever it holds is no reason not to start."""

import json
import threading
from pathlib import Path

import pytest
import torch

from weft.engine.tune import compare
from weft.engine.tune.compare import ChoiceFile, default_path, machine_text
from weft.engine.wire import machine as machine_facts
from weft.engine.wire.machine import KernelChoice, Verdict

NAMES = ("triton", "flash2")


VERDICTS = Verdict("triton", seconds=0.002, error=0.01), Verdict("flash2", fault="not installed")


def settled(
    component: str = "attention",
    shapes: str = "8 x 128",
    chosen: str = "triton",
    verdicts: tuple[Verdict, ...] = VERDICTS,
) -> KernelChoice:
    return KernelChoice(component, shapes, NAMES, chosen, verdicts)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "weft" / "settled.json"


def test_a_choice_is_found_again_for_the_same_shapes_candidates_and_machine(path: Path) -> None:
    ChoiceFile(path, "here").keep(settled())
    file = ChoiceFile(path, "here")
    assert file.find("attention", "8 x 128", NAMES) == settled()
    assert file.find("sampler", "8 x 128", NAMES) is None
    assert file.find("attention", "8 x 64", NAMES) is None
    assert file.find("attention", "8 x 128", (*NAMES, "flash3")) is None
    assert ChoiceFile(path, "there").find("attention", "8 x 128", NAMES) is None
    newer = settled(verdicts=(Verdict("triton", seconds=0.001, error=0.02), Verdict("flash2", fault="not installed")))
    file.keep(newer)
    assert file.of_this_machine() == (newer,)  # in place of the older one
    assert [entry.name for entry in path.parent.iterdir()] == ["settled.json"]


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe", b'{"version": 2}', b'[{"machine": "here"}]', b"[" * 100_000, b"null"]
)
def test_a_broken_or_foreign_file_is_ignored_and_replaced(path: Path, content: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    file = ChoiceFile(path, "here")
    assert file.of_this_machine() == ()
    file.keep(settled())
    assert file.of_this_machine() == (settled(),)


@pytest.mark.parametrize(
    ("before", "after"),
    [('"chosen": "triton"', '"chosen": "malware"'), ('"chosen": "triton"', '"chosen": "flash2"'), ("0.002", "0.001"),
     ('"machine": "elsewhere"', '"machine": "here"'), ('"version": 1', '"version": 2')],
)  # fmt: skip
def test_what_was_changed_since_is_not_believed(path: Path, before: str, after: str) -> None:
    ChoiceFile(path, "elsewhere").keep(settled("sampler"))
    ChoiceFile(path, "here").keep(settled())
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after))
    file = ChoiceFile(path, "here")
    assert file.of_this_machine() == ()
    file.keep(settled())
    assert file.of_this_machine() == (settled(),)


def test_a_choice_that_is_none_of_the_candidates_or_is_wrong_is_ignored(path: Path) -> None:
    file, none_is_right = ChoiceFile(path, "here"), (Verdict("triton", fault="wrong"), VERDICTS[1])
    for chosen, verdicts, is_found in (
        ("malware", VERDICTS, False), ("flash2", VERDICTS, False), ("flash2", none_is_right, True)
    ):  # fmt: skip
        file.keep(settled(chosen=chosen, verdicts=verdicts))
        assert (file.find("attention", "8 x 128", NAMES) is not None) == is_found


def test_a_file_is_bounded_before_it_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ChoiceFile(path, "here").keep(settled())
    monkeypatch.setattr(compare, "_MAX_FILE_BYTES", 100)
    assert ChoiceFile(path, "here").of_this_machine() == ()


def test_a_folder_that_cannot_be_written_is_no_fault(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "weft").write_text("a file where the folder should be")
    with caplog.at_level("INFO"):
        ChoiceFile(tmp_path / "weft" / "settled.json", "here").keep(settled())
    assert "is not kept" in caplog.text
    nowhere = ChoiceFile(None, "here")
    nowhere.keep(settled())
    assert nowhere.of_this_machine() == ()


def test_the_file_stays_small(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "_MAX_NUM_ENTRIES", 3)
    file = ChoiceFile(path, "here")
    for shapes in "abcde":
        file.keep(settled(shapes=shapes))
    assert [kept.shapes for kept in file.of_this_machine()] == ["c", "d", "e"]


def test_a_reader_never_sees_half_a_file(path: Path) -> None:
    file = ChoiceFile(path, "here")
    file.keep(settled())

    def write(component: str) -> None:
        for number in range(30):
            file.keep(settled(component, str(number)))

    writers = [threading.Thread(target=write, args=(component,)) for component in ("sampler", "layers")]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert json.loads(path.read_bytes())
    assert [entry.name for entry in path.parent.iterdir()] == ["settled.json"]


def test_the_file_is_in_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert default_path() == Path("/elsewhere/weft/settled.json")
    for value in ("", "relative"):  # neither is valid by the specification
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert default_path() == tmp_path / ".cache" / "weft" / "settled.json"


def test_the_machine_is_another_one_with_another_device_driver_version_or_kernel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    texts = [machine_text(torch.device("cpu"))]
    assert machine_text(torch.device("cpu")) == texts[0]
    versions = {"weft": "1.2", "torch": "2.11.0+cu128"}
    monkeypatch.setattr(compare, "package_version", versions.get)
    texts.append(machine_text(torch.device("cpu")))
    kernel = tmp_path / "sdpa.py"
    kernel.write_text("pass")
    monkeypatch.setattr(compare, "_KERNELS", tmp_path)
    compare._digest.cache_clear()
    texts.append(machine_text(torch.device("cpu")))
    kernel.write_text("...")
    compare._digest.cache_clear()
    texts.append(machine_text(torch.device("cpu")))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H100")
    monkeypatch.setattr(machine_facts, "_DRIVER", tmp_path / "version")
    texts.append(machine_text(torch.device("cuda")))
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Release\n")
    texts.append(machine_text(torch.device("cuda")))
    compare._digest.cache_clear()
    assert len(set(texts)) == len(texts)
    assert texts[-1].startswith("H100, driver 570.86.15, weft 1.2, torch 2.11.0+cu128, kernels ")
