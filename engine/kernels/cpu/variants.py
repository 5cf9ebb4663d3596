"""The instruction sets of the native kernels (variants.toml): which this machine runs, and how they are compiled.

Needs the standard library alone: setup.py and `make` run this file before anything is installed. What the compiler made
is kept in a cache by content: of the compiler, its flags, a source file and the headers that it includes. So a change
compiles again what it changes, and whoever needs another variant, as the tests do, compiles it once.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).resolve().parent
SOURCES: Final = FOLDER / "c"
_DATA: Final[dict[str, Any]] = tomllib.loads((FOLDER / "variants.toml").read_text(encoding="utf-8"))
_KEPT_S: Final = 30 * 24 * 3600  # what nobody asked for meanwhile leaves the cache


@dataclass(frozen=True, slots=True)
class Variant:
    """One instruction set; variants.toml describes the fields."""

    name: str
    needs: frozenset[str]
    flags: tuple[str, ...]
    slow_on: tuple[str, ...]
    seconds: float


VARIANTS: Final = {
    name: Variant(
        name,
        frozenset(data["needs"].split()),
        (*_DATA["flags"].split(), *data["flags"].split()),
        tuple(data.get("slow_on", ())),
        data["seconds"],
    )
    for name, data in _DATA["variants"].items()
}
"""By name, best first."""


# --- this machine


def cpu_value(key: str) -> str:
    """What /proc/cpuinfo says under a key of the first CPU; empty if it says nothing."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")


def runnable() -> list[str]:
    """Names of the variants that this CPU can run, best first."""
    flags = set(cpu_value("flags").split())
    return [name for name, variant in VARIANTS.items() if variant.needs <= flags]


def preferred() -> list[str]:
    """Those of them that are faster than what else there is, best first."""
    makers = {"*", cpu_value("vendor_id")}
    return [name for name in runnable() if makers.isdisjoint(VARIANTS[name].slow_on)]


def source_digest() -> str:
    """Changes with every change of the source. A compiled variant knows it: `weft_source()`."""
    digest = hashlib.blake2b(repr([variant.flags for variant in VARIANTS.values()]).encode(), digest_size=16)
    for file in sorted(SOURCES.rglob("*.[ch]")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


# --- compilation


class CompilerError(Exception):
    """There is no compiler, or it fails. The message says what to do."""


def install(folder: Path, default: str) -> list[Path]:
    """Compile what the environment variable WEFT_VARIANTS names, or else what `default` does, into a folder.

    That is "best", "all", or names with commas between them. Without a compiler it says what to do, and makes nothing.
    """
    wanted = os.environ.get("WEFT_VARIANTS") or default
    try:
        names = _best() if wanted == "best" else list(VARIANTS) if wanted == "all" else wanted.split(",")
        if unknown := sorted(set(names) - set(VARIANTS)):
            raise SystemExit(f"WEFT_VARIANTS: no variant {', '.join(unknown)}; there are {', '.join(VARIANTS)}")
        made = build(names, folder)
    except CompilerError as error:
        print(error, file=sys.stderr)
        return []
    for file in set(folder.glob("*.so")) - set(made):
        file.unlink()  # compiled from another source
    return made


def build(names: Sequence[str], folder: Path, cache: Path | None = None) -> list[Path]:
    """Compile variants into a folder, with all cores; says on stderr what it does.

    Args:
        names: Of the variants.
        folder: For the shared objects.
        cache: Where compiled files are kept; None: in the user's cache.

    Returns:
        The shared objects. A variant that the compiler does not know is left out.

    Raises:
        CompilerError: There is no compiler.
    """
    compiler = _Compiler()
    with _locked(cache) as objects:
        jobs = {name: compiler.jobs(VARIANTS[name], objects) for name in names}
        _compile_all([job for each in jobs.values() for job in each])
        whole = {name: each for name, each in jobs.items() if all(job.target.exists() for job in each)}
        made = [compiler.link(each, folder / f"{name}.so") for name, each in whole.items()]
        _prune(objects, [job for each in whole.values() for job in each])
    return made


def _best() -> list[str]:
    """The one variant that this machine is to run: the best that the compiler knows and the kernel grants."""
    compiler = _Compiler()
    names = [*preferred(), "portable"]
    return next(([name] for name in names if compiler.runs(VARIANTS[name])), [])


@dataclass(frozen=True, slots=True)
class _Job:
    """One file of one variant."""

    variant: Variant
    source: Path
    command: tuple[str, ...]
    target: Path
    seconds: float
    """About how long it takes: the share of its text, with all that it includes, in what the whole variant takes."""

    def run(self) -> str:
        """Compile, and return what the compiler says if it fails."""
        scratch = self.target.with_suffix(f".{os.getpid()}.o")
        command = [*self.command, "-I", str(SOURCES / "include"), "-c", str(self.source), "-o", str(scratch)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
        scratch.replace(self.target)
        return ""


class _Compiler:
    """The C compiler of this machine."""

    def __init__(self) -> None:
        named = os.environ.get("CC", "").split()
        found = [path for name in (named[:1] or ["gcc", "cc", "clang"]) if (path := shutil.which(name))]
        if not found:
            raise CompilerError(
                "Weft's CPU kernels need a C compiler: on Debian or Ubuntu, apt install gcc libc6-dev; on Fedora, dnf "
                "install gcc. Then run make again, or install Weft again. Until then torch computes, more slowly"
            )
        self._command = (found[0], *named[1:])
        version = subprocess.run([*self._command, "--version"], capture_output=True, check=False)
        self._version = version.stdout + os.uname().machine.encode()

    def jobs(self, variant: Variant, objects: Path) -> list[_Job]:
        """Every source file of a variant. The targets that exist are up to date."""
        texts = {source: b"".join(_with_headers(source)) for source in sorted(SOURCES.glob("*.c"))}
        length = sum(map(len, texts.values()))
        jobs = []
        for source, text in texts.items():
            command = (*self._command, *variant.flags)
            if source.name == "initialise.c":
                command += (f'-DWEFT_SOURCE="{source_digest()}"',)
            key = hashlib.blake2b(repr(command).encode() + self._version + text, digest_size=16).hexdigest()
            jobs.append(_Job(variant, source, command, objects / f"{key}.o", variant.seconds * len(text) / length))
        return jobs

    def link(self, jobs: Sequence[_Job], target: Path) -> Path:
        """Make a shared object. Processes that have loaded an earlier one keep it."""
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = target.with_suffix(f".{os.getpid()}")
        given = [str(job.target) for job in sorted(jobs, key=lambda job: job.source)]
        command = [*self._command, "-shared", "-pthread", *given, "-o", str(scratch)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CompilerError(f"the CPU kernels cannot be linked: {done.stderr[:500]}")
        scratch.replace(target)
        return target

    def runs(self, variant: Variant) -> bool:
        """Whether the compiler knows the instructions, and the kernel lets a process use them: by the smallest file."""
        with tempfile.TemporaryDirectory() as folder:
            (job,) = (job for job in self.jobs(variant, Path(folder)) if job.source.name == "initialise.c")
            if fault := job.run():
                print(f"CPU kernels {variant.name} left out: {fault}", file=sys.stderr)
                return False
            probe = self.link([job], Path(folder, "probe.so"))
            code = f"import ctypes, sys; sys.exit(ctypes.CDLL({str(probe)!r}).weft_initialise() != 0)"
            return subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def _with_headers(source: Path) -> tuple[bytes, ...]:
    """The texts of a file and of the files of ours that it includes, each once."""
    texts: dict[str, bytes] = {}
    names = [source.name]
    while names:
        if (name := names.pop()) not in texts:
            texts[name] = (source if name == source.name else SOURCES / "include" / name).read_bytes()
            names += re.findall(r'^#include "(.+)"', texts[name].decode(), re.MULTILINE)
    return tuple(texts[name] for name in sorted(texts))


def _compile_all(jobs: Sequence[_Job]) -> None:
    """Compile what is not in the cache, the longest first, and show how far that is."""
    missing = sorted((job for job in jobs if not job.target.exists()), key=lambda job: -job.seconds)
    num_cores = len(os.sched_getaffinity(0))
    # Other programs take their share of the cores.
    seconds = sum(job.seconds for job in missing) * (os.getloadavg()[0] + num_cores) / num_cores**2
    title = f"CPU kernels ({', '.join(dict.fromkeys(job.variant.name for job in missing))})"
    if missing:
        print(f"Compiling {title}: about {seconds + 1:.0f} s with {num_cores} cores", file=sys.stderr)
    start, is_terminal = time.monotonic(), sys.stderr.isatty()
    faults: dict[str, str] = {}
    with ThreadPoolExecutor(num_cores) as pool:
        running = {pool.submit(job.run): job for job in missing}
        for num_done, future in enumerate(as_completed(running), 1):
            if fault := future.result():
                faults.setdefault(running[future].variant.name, fault)
            if is_terminal:
                bar = ("#" * (30 * num_done // len(missing))).ljust(30)
                print(f"\r  [{bar}] {num_done} of {len(missing)} files", end="", file=sys.stderr, flush=True)
    if missing:
        took = f"{len(missing)} files in {time.monotonic() - start:.0f} s"
        print("\n" * is_terminal + f"Compiled {title}: {took}", file=sys.stderr)
    for name, fault in faults.items():
        print(f"CPU kernels {name} left out: {fault}", file=sys.stderr)


# --- the cache


def cache_folder() -> Path:
    """Where compiled files are kept (XDG Base Directory Specification). RuntimeError: the user has no home."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (folder if folder.is_absolute() else Path("~/.cache").expanduser()) / "weft" / "kernels"


@contextlib.contextmanager
def _locked(cache: Path | None) -> Iterator[Path]:
    """The folder of the cache, for one process at a time; a temporary one for users who cannot have one."""
    with contextlib.ExitStack() as stack:
        try:
            objects = cache or cache_folder()
            objects.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context((objects / "lock").open("w"))
        except (OSError, RuntimeError):
            objects = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        else:
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield objects


def _prune(objects: Path, used: Sequence[_Job]) -> None:
    """Remember what was used, and remove what was not for a month."""
    for job in used:
        job.target.touch()
    for file in objects.glob("*.o"):
        if file.stat().st_mtime < time.time() - _KEPT_S:
            file.unlink()


if __name__ == "__main__":
    sys.exit(not install(Path(sys.argv[1]) if sys.argv[1:] else FOLDER, "best"))
