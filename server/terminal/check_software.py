"""Checks of the installation for `weft doctor`. Each takes facts and returns findings."""

from collections.abc import Mapping

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from weft.engine.shared.machine_facts import MachineFacts
from weft.server.terminal.finding import Finding, Severity, gigabytes

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
        return Finding("native kernels", "ok", f"{facts.native} is used (also compiled: {others or 'none'})")
    slower = "models on the CPU use torch's operations, which are slower"
    if facts.compiled:
        advice = "if the CPU has AVX2, install Weft again: the compiled kernels may be out of date"
        return Finding("native kernels", "note", f"none of {', '.join(facts.compiled)} runs here: {slower}", advice)
    advice = f"{_COMPILER_ADVICE}, then install Weft again"
    return Finding("native kernels", "note", f"not compiled: {slower}", advice)


def check_settled(facts: MachineFacts) -> list[Finding]:
    """What earlier starts chose to compute the models with, one line for each component and shape."""
    findings = []
    for settled in facts.settled:
        wrong = ", ".join(v.candidate for v in settled.verdicts if v.fault.startswith("wrong"))
        remedy = "gives wrong results here and is not used; another version of torch or of the driver may help"
        status: Severity = "note" if wrong else "ok"
        detail = f"{settled.summary()} ({settled.shapes})"
        findings.append(Finding(settled.component, status, detail, f"{wrong} {remedy}" if wrong else ""))
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
                f"{gpu.name}, compute capability {gpu.compute_capability}, {gigabytes(gpu.free_bytes)} free; "
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
