"""`weft doctor`: examines machine and installation, and says what is missing and what to do about it.

The functions `check_...` take facts and judge them; the others gather the facts. A child process asks torch. Serves
nothing and loads no model. Uses the network only if the model is a hub id, and then for a few seconds at most.
"""

import importlib.metadata
import os
import pathlib
import platform
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import msgspec
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rich.console import Console
from rich.text import Text

from weft.engine.wire.machine import MachineFacts, driver_version, package_version
from weft.engine.wire.waiting_threads import WaitingThreads
from weft.server.http.limits import SHARE_OF_FILES, raise_file_limit
from weft.server.library import library
from weft.server.library.contents import facts_of, lacks
from weft.server.library.names import OnHub, parse
from weft.server.settings import Settings, StartError
from weft.server.supervise import checkpoint, runtime_folder
from weft.server.supervise.checkpoint import DEMO_MODEL, check_tokenizer
from weft.server.supervise.listening import listen
from weft.server.supervise.spawn import python_command
from weft.server.text.shield import one_line

Severity = Literal["ok", "note", "missing"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check: its name, what it found, and what to do about it, if anything.

    "missing": Weft cannot serve with these settings. "note": it can, but something is worth knowing.
    """

    name: str
    status: Severity
    detail: str
    advice: str = ""


def _gigabytes(num_bytes: int) -> str:
    """Format a number of bytes, such as 1.2 GB."""
    return f"{num_bytes / 1e9:,.1f} GB"


MIN_FREE_BYTES = 10**9
MIN_SHARED_BYTES = 64 << 20
MIN_RUNTIME_BYTES = 10 << 20
_NUM_RUNNING = 64
_HUB_ADVICE = {401: "set HF_TOKEN", 403: "accept its terms on the hub and set HF_TOKEN", 404: "check the spelling"}


def check_memory(free_bytes: int, weights_bytes: int) -> Finding:
    """Free memory of the host against the size of the weights (0: unknown); `weft plan` knows more."""
    detail = f"{_gigabytes(free_bytes)} free"
    if weights_bytes >= free_bytes:
        detail += f", and the files of the weights take {_gigabytes(weights_bytes)}"
        advice = "serve a smaller model, or stop other programs; weft plan says what a model needs"
        return Finding("memory", "note", detail, advice)
    if free_bytes < MIN_FREE_BYTES:
        return Finding("memory", "note", detail, "stop other programs, or give the container more")
    return Finding("memory", "ok", detail)


def check_port(host: str, port: int, fault: str | None) -> Finding:
    """Whether the address can be listened on. fault: why not (None: it can)."""
    if fault is None:
        return Finding("port", "ok", f"{host} port {port} is free")
    return Finding("port", "missing", fault, "stop that process, or choose another port with --port")


def check_folder(folder: str, names: list[str]) -> Finding:
    """A local model, judged by the names of its files."""
    if not (lacking := lacks(set(names))):
        return Finding("model", "ok", folder)
    advice = "a model is a folder in Hugging Face layout"
    return Finding("model", "missing", f"{folder} has no {', no '.join(lacking)}", advice)


def check_hub(model: str, answer: int | str, is_cached: bool) -> Finding:
    """A hub id. answer: the status of a request for its config.json, or why there was none."""
    if answer == 200:
        return Finding("model", "ok", f"{model} is on the hub{' and in the cache' if is_cached else ''}")
    if is_cached:
        detail = f"{model} is in the cache; the hub says {answer}"
        return Finding("model", "note", detail, "weft plan says whether Weft can run it")
    if isinstance(answer, str):
        advice = "check network, proxy and HF_ENDPOINT, or name a local folder"
        return Finding("model", "missing", f"{model}: the hub cannot be reached ({answer})", advice)
    return Finding("model", "missing", f"{model}: the hub answers {answer}", _HUB_ADVICE.get(answer, "try again later"))


def check_shared_memory(free_bytes: int | None) -> Finding:
    """/dev/shm, which multi-GPU libraries use. free_bytes None: it cannot be written to."""
    if free_bytes is None:
        return Finding("/dev/shm", "note", "cannot be written to", "mount a tmpfs there (docker run --shm-size 1g)")
    if free_bytes < MIN_SHARED_BYTES:
        return Finding("/dev/shm", "note", f"{free_bytes >> 20} MiB free", "make it larger (docker run --shm-size 1g)")
    return Finding("/dev/shm", "ok", f"{_gigabytes(free_bytes)} free")


def check_open_files(limit: int, max_num_waiting: int) -> Finding:
    """The hard limit on open files, to which a server raises its own, against the number of streams."""
    num_connections = int(limit * SHARE_OF_FILES)
    wanted = max_num_waiting + _NUM_RUNNING
    if num_connections < wanted:
        detail = f"at most {limit}, {num_connections} for connections, and {max_num_waiting} requests may wait"
        advice = f"a hard limit of {1 << int(wanted / SHARE_OF_FILES).bit_length()} (ulimit -Hn) for weft serve"
        return Finding("open files", "note", detail, advice)
    return Finding("open files", "ok", f"at most {limit}")


def check_runtime_folder(folder: str, free_bytes: int | None) -> Finding:
    """The folder of sockets and status page. free_bytes None: it cannot be written to."""
    if free_bytes is None or free_bytes < MIN_RUNTIME_BYTES:
        fault = "cannot be written to" if free_bytes is None else f"has {free_bytes >> 10} KiB left"
        return Finding("runtime folder", "missing", f"{folder} {fault}", "set XDG_RUNTIME_DIR to a folder of yours")
    return Finding("runtime folder", "ok", folder)


_COMPILER_ADVICE = "install GCC 11 or newer and Python's headers (Debian: apt install gcc libc6-dev python3-dev)"
_SHOWN_PACKAGES = ("torch", "transformers", "tokenizers")


def check_python(version: str, wanted: str) -> Finding:
    """The interpreter against the package's range, such as ">=3.11"."""
    if SpecifierSet(wanted).contains(version, prereleases=True):
        return Finding("Python", "ok", f"{version} ({wanted})")
    return Finding("Python", "missing", f"{version} ({wanted})", f"make a virtual environment with Python {wanted}")


def check_packages(requirements: list[Requirement], installed: Mapping[str, str | None]) -> list[Finding]:
    """Installed versions by package name (None: not installed) against the requirements."""
    findings, num_others = [], 0
    for requirement in requirements:
        name, wanted, version = requirement.name, requirement.specifier, installed[requirement.name]
        if version is None or not wanted.contains(version, prereleases=True):
            detail = f"{version or 'not installed'} ({wanted})"
            findings.append(Finding(name, "missing", detail, f"pip install '{requirement}'"))
        elif name in _SHOWN_PACKAGES:
            findings.append(Finding(name, "ok", f"{version} ({wanted})"))
        else:
            num_others += 1
    return [*findings, Finding("other packages", "ok", f"{num_others} of the right version")]


def check_kernels(facts: MachineFacts) -> Finding:
    """Weft's own kernels for the CPU."""
    if facts.native:
        others = ", ".join(name for name in facts.compiled if name != facts.native)
        detail = f"{facts.native} is used" + (f" (also compiled: {others})" if others else "")
        return Finding("native kernels", "ok", detail)
    slower = "models on the CPU use torch's operations, which are slower"
    if facts.compiled:
        advice = (
            "if the CPU has AVX2, install Weft again, here: they are for another machine, or their source has changed"
        )
        return Finding("native kernels", "note", f"none of {', '.join(facts.compiled)} runs here: {slower}", advice)
    advice = f"{_COMPILER_ADVICE}, then install Weft again"
    return Finding("native kernels", "note", f"not compiled: {slower}", advice)


def check_choices(facts: MachineFacts) -> list[Finding]:
    """What earlier starts chose to compute the models with, one line for each component and shape."""
    findings = []
    for choice in facts.settled:
        wrong = ", ".join(v.candidate for v in choice.verdicts if v.fault.startswith("wrong"))
        remedy = "gives wrong results here and is not used; another version of torch or of the driver may help"
        status: Severity = "note" if wrong else "ok"
        detail = f"{choice.summary()} ({choice.shapes})"
        findings.append(Finding(choice.component, status, detail, f"{wrong} {remedy}" if wrong else ""))
    return findings


def check_compiler(compiler: str | None, has_headers: bool, facts: MachineFacts) -> Finding:
    """The C compiler (None: none). Weft needs it at installation, Triton at run time."""
    lacking = [] if compiler else ["no C compiler"]
    lacking += [] if has_headers else ["no headers of Python"]
    if not lacking:
        return Finding("compiler", "ok", f"{compiler}, with Python's headers")
    if facts.native and not facts.cuda_devices:
        return Finding("compiler", "ok", f"{' and '.join(lacking)}, not needed: the native kernels are compiled")
    return Finding("compiler", "note", " and ".join(lacking), _COMPILER_ADVICE)


def check_cuda(facts: MachineFacts, driver: str | None, device: str) -> list[Finding]:
    """NVIDIA's driver (None: none), torch's build and its devices against the setting `device`."""
    for_cuda = f"torch for CUDA {facts.cuda_version}"
    if facts.cuda_devices:
        return [
            Finding(
                "CUDA",
                "ok",
                f"{gpu.name}, compute capability {gpu.compute_capability}, {_gigabytes(gpu.free_bytes)} free; "
                f"driver {driver or 'unknown'}, {for_cuda}",
            )
            for gpu in facts.cuda_devices
        ]
    status: Severity = "missing" if device == "cuda" else "note"
    if driver is None:
        advice = "install NVIDIA's driver, or leave --device at auto" if device == "cuda" else ""
        return [Finding("CUDA", status, "no NVIDIA driver: models run on the CPU", advice)]
    if facts.cuda_version is None:
        advice = "install a torch for CUDA: make distclean, then make serve TORCH=torch"
        return [Finding("CUDA", status, f"driver {driver}, but this torch is a build for the CPU", advice)]
    advice = "see what nvidia-smi says, and CUDA_VISIBLE_DEVICES; an old driver may be too old for this torch"
    return [Finding("CUDA", status, f"driver {driver} and {for_cuda}, but torch finds no device", advice)]


def check_triton(version: str | None) -> Finding:
    """Triton, which comes with torch for CUDA."""
    if version is None:
        return Finding("Triton", "note", "not installed", "pip install triton")
    return Finding("Triton", "ok", f"{version}; compiles its kernels when they are first used")


_HUB_S = 4.0
_COMMAND_S = 120.0
_COLOURS = {"ok": "green", "note": "yellow", "missing": "bold red"}


def run(settings: Settings) -> int:
    """Print every finding. Returns 1 if anything is missing, else 0."""
    console = Console(highlight=False, soft_wrap=True)
    num_missing = 0
    for finding in examine(settings):
        num_missing += finding.status == "missing"
        line = Text.assemble((f"{finding.status:<8}", _COLOURS[finding.status]), f"{finding.name:<15} {finding.detail}")
        console.print(line)
        if finding.advice:
            console.print(Text(f"{'':<24}-> {finding.advice}"))
    print(f"\n{num_missing} missing" if num_missing else "\nnothing is missing")
    return int(num_missing > 0)


def examine(settings: Settings) -> Iterator[Finding]:
    """Yield all findings, the quick ones first."""
    names = importlib.metadata.metadata("weft")
    command = python_command("weft.engine.start.report", "machine")
    asking = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    yield check_python(platform.python_version(), names["Requires-Python"])
    requirements = [Requirement(text) for text in importlib.metadata.requires("weft") or [] if "extra ==" not in text]
    versions = {requirement.name: package_version(requirement.name) for requirement in requirements}
    yield from check_packages(requirements, versions)
    yield from map(_model, _each_model(settings))
    yield _port(settings)
    parent = runtime_folder.runtime_parents()[0]
    yield check_runtime_folder(parent, _free_bytes(parent))
    yield check_shared_memory(_free_bytes("/dev/shm"))
    yield check_open_files(raise_file_limit(), settings.max_num_waiting)
    yield from _ask(asking, settings)


def _ask(asking: subprocess.Popen[bytes], settings: Settings) -> Iterator[Finding]:
    """Yield the findings that need the child process's answer."""
    log = b""
    try:
        said, log = asking.communicate(timeout=_COMMAND_S)
        facts = msgspec.json.decode(said, type=MachineFacts)
    except (subprocess.TimeoutExpired, msgspec.DecodeError):
        asking.kill()
        *_, last = b"no answer", *log.strip().splitlines()
        detail = f"torch cannot be used: {last.decode('utf-8', 'replace')}"
        yield Finding("engine", "missing", detail, "install Weft again into a fresh virtual environment")
        return
    yield check_kernels(facts)
    yield from check_choices(facts)
    has_headers = (pathlib.Path(sysconfig.get_paths()["include"]) / "Python.h").is_file()
    yield check_compiler(_compiler(), has_headers, facts)
    yield from check_cuda(facts, driver_version(), settings.device)
    if facts.cuda_devices:
        yield check_triton(package_version("triton"))
    yield check_memory(facts.free_bytes, sum(map(_weights_bytes, _each_model(settings))))


def _weights_bytes(settings: Settings) -> int:
    """The size of the files of a local model's weights; 0 if they are not here."""
    return facts_of(pathlib.Path(settings.model or DEMO_MODEL).expanduser()).size_bytes


def _each_model(settings: Settings) -> list[Settings]:
    """The settings of each of several models, or of the only one."""
    return [settings.for_model(name) for name in settings.models] or [settings]


def _compiler() -> str | None:
    """The C compiler and its version; None if there is none."""
    command = os.environ.get("CC") or next(filter(shutil.which, ("cc", "gcc", "clang")), "")
    try:
        asked = subprocess.run([*command.split(), "--version"], capture_output=True, text=True, timeout=_COMMAND_S)
    except (OSError, IndexError):
        return None
    return asked.stdout.partition("\n")[0] or None


def _free_bytes(folder: str) -> int | None:
    """Free bytes in a folder; None if it cannot be written to."""
    if not os.access(folder, os.W_OK | os.X_OK):
        return None
    return shutil.disk_usage(folder).free


def _model(settings: Settings) -> Finding:
    if settings.model is None:
        return Finding("model", "ok", "the demo model of the package")
    try:
        source = parse(settings.model)
    except StartError as error:
        return _refused(error)
    if not isinstance(source, OnHub):
        if library.find(source) is None:
            return Finding("model", "note", f"{settings.model} is not here yet", "weft pull fetches it")
        return _local_model(settings.model)
    import httpx
    from huggingface_hub import constants, get_token

    token = get_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    file = ".gitattributes" if source.file or "gguf" in source.repository.lower() else "config.json"
    address = f"{constants.ENDPOINT}/{source.repository}/resolve/main/{file}"
    answer: int | str
    ask = partial(httpx.head, address, headers=headers, follow_redirects=True, timeout=_HUB_S)
    try:  # the timeout is that of each read of each redirection
        answer = WaitingThreads("hub", 1).submit(ask).result(2 * _HUB_S).status_code
    except TimeoutError:
        answer = "timed out"
    except httpx.HTTPError as error:
        answer = one_line(str(error)) or type(error).__name__
    if (found := library.find(source)) is not None:
        try:
            checkpoint.resolve(str(found))
        except StartError as error:
            return _refused(error)
    return check_hub(settings.model, answer, found is not None)


def _local_model(model: str) -> Finding:
    """A model in a folder: what `weft serve` would say, and whether all files are there."""
    try:
        folder = checkpoint.resolve(model)
        notes = check_tokenizer(folder)
    except StartError as error:
        return _refused(error)
    finding = Finding("model", "ok", model)
    if folder == pathlib.Path(model).expanduser().resolve():  # else one that was made for a GGUF file
        finding = check_folder(str(folder), os.listdir(folder))
    return Finding("model", "note", f"{folder}: {'; '.join(notes)}") if notes and finding.status == "ok" else finding


def _refused(error: StartError) -> Finding:
    advice = "a model is a folder in Hugging Face layout, a GGUF file or a hub id; pickled weights are not read"
    return Finding("model", "missing", str(error).removeprefix("model: "), advice)


def _port(settings: Settings) -> Finding:
    fault = None
    try:
        listen(settings.host, settings.port).close()
    except StartError as error:
        fault = str(error).removesuffix(" (--host, --port)")
    return check_port(settings.host, settings.port, fault)
