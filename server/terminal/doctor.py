"""`weft doctor`: examines machine and installation, and says what is missing and what to do about it.

Gathers the facts here; `check_software` and `check_machine` judge them. A child process asks torch. Serves nothing and
loads no model. Uses the network only if the model is a hub id, and then for a few seconds at most.
"""

import contextlib
import importlib.metadata
import os
import pathlib
import platform
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator

import msgspec
from packaging.requirements import Requirement
from rich.console import Console
from rich.text import Text

from weft.engine.gguf.file import GgufError, parts
from weft.engine.shared.machine_facts import MachineFacts, driver_version, package_version
from weft.server.http.connections import raise_file_limit
from weft.server.run import checkpoint
from weft.server.run.checkpoint import DEMO_MODEL, gguf_on_hub, is_hub_id
from weft.server.run.child import python_command
from weft.server.run.model_check import check_tokenizer
from weft.server.settings import Settings, StartError
from weft.server.supervise import runtime_folder, supervisor
from weft.server.terminal import check_machine, check_software
from weft.server.terminal.finding import Finding

_HUB_S = 4.0
_COMMAND_S = 120.0
_COLOURS = {"ok": "green", "note": "yellow", "missing": "bold red"}
_LISTENS = "0A"


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
    command = python_command("weft.engine.start.machine_facts")
    asking = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    yield check_software.check_python(platform.python_version(), names["Requires-Python"])
    requirements = [Requirement(text) for text in importlib.metadata.requires("weft") or [] if "extra ==" not in text]
    versions = {requirement.name: package_version(requirement.name) for requirement in requirements}
    yield from check_software.check_packages(requirements, versions)
    yield from map(_model, _each_model(settings))
    yield _port(settings)
    parent = runtime_folder.runtime_parents()[0]
    yield check_machine.check_runtime_folder(parent, _free_bytes(parent))
    yield check_machine.check_shared_memory(_free_bytes("/dev/shm"))
    yield check_machine.check_open_files(raise_file_limit(), settings.max_num_waiting)
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
    yield check_software.check_kernels(facts)
    yield from check_software.check_settled(facts)
    has_headers = (pathlib.Path(sysconfig.get_paths()["include"]) / "Python.h").is_file()
    yield check_software.check_compiler(_compiler(), has_headers, facts)
    yield from check_software.check_cuda(facts, driver_version(), settings.device)
    if facts.cuda_devices:
        yield check_software.check_triton(package_version("triton"))
    yield check_machine.check_memory(facts.free_bytes, sum(map(_weights_bytes, _each_model(settings))))


def _weights_bytes(settings: Settings) -> int:
    """The size of the files of a local model's weights; 0 if they are not here."""
    path = pathlib.Path(settings.model or DEMO_MODEL).expanduser()
    files = [*path.glob("*.safetensors")] or [*path.glob("*.gguf")]
    with contextlib.suppress(GgufError):
        files += parts(path) if path.is_file() else ()
    return sum(file.stat().st_size for file in files)


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
    folder = pathlib.Path(settings.model).expanduser()
    of_gguf = None if folder.exists() else gguf_on_hub(settings.model)
    if of_gguf is None and (folder.exists() or not is_hub_id(settings.model)):
        return _local_model(settings.model)
    import httpx
    from huggingface_hub import constants, get_token, try_to_load_from_cache

    token = get_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    model, file = (of_gguf[0], ".gitattributes") if of_gguf else (settings.model, "config.json")
    address = f"{constants.ENDPOINT}/{model}/resolve/main/{file}"
    answer: int | str
    try:
        answer = httpx.head(address, headers=headers, follow_redirects=True, timeout=_HUB_S).status_code
    except httpx.HTTPError as error:
        answer = str(error) or type(error).__name__
    cached = try_to_load_from_cache(model, file)
    folder_of_cached = pathlib.Path(cached).parent if isinstance(cached, str) else None
    found = checkpoint.cached_gguf(*of_gguf) if of_gguf else folder_of_cached
    if found is not None:
        try:
            checkpoint.resolve(str(found))
        except StartError as error:
            return _refused(error)
    return check_machine.check_hub(settings.model, answer, found is not None)


def _local_model(model: str) -> Finding:
    """A model in a folder: what `weft serve` would say, and whether all files are there."""
    try:
        folder = checkpoint.resolve(model)
        notes = check_tokenizer(folder)
    except StartError as error:
        return _refused(error)
    finding = Finding("model", "ok", model)
    if folder == pathlib.Path(model).expanduser().resolve():  # else one that was made for a GGUF file
        finding = check_machine.check_folder(str(folder), os.listdir(folder))
    return Finding("model", "note", f"{folder}: {'; '.join(notes)}") if notes and finding.status == "ok" else finding


def _refused(error: StartError) -> Finding:
    advice = "a model is a folder in Hugging Face layout, a GGUF file or a hub id; pickled weights are not read"
    return Finding("model", "missing", str(error).removeprefix("model: "), advice)


def _port(settings: Settings) -> Finding:
    fault = owner = None
    try:
        supervisor.listen(settings.host, settings.port).close()
    except StartError as error:
        fault = str(error).removesuffix(" (--host, --port)")
        owner = port_owner(settings.port)
    return check_machine.check_port(settings.host, settings.port, fault, owner)


def port_owner(port: int, proc: pathlib.Path = pathlib.Path("/proc")) -> str | None:
    """Who listens on a TCP port, such as "weft (process 7)"; None if nobody, or a process of another user."""
    sockets = set()
    for table in ("tcp", "tcp6"):
        path = proc / "net" / table
        rows = [line.split() for line in path.read_text().splitlines()[1:]] if path.exists() else []
        sockets |= {f"socket:[{row[9]}]" for row in rows if row[3] == _LISTENS and row[1].endswith(f":{port:04X}")}
    for process in sorted(
        proc.glob("[0-9]*"), key=lambda path: int(path.name)
    ):  # the supervisor has a lower id than its children
        try:
            if any(os.readlink(file) in sockets for file in (process / "fd").iterdir()):
                return f"{(process / 'comm').read_text().strip()} (process {process.name})"
        except OSError:  # the process has ended, or is another user's
            continue
    return None
