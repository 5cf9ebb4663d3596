"""Checks of what is installed. Each takes what is there and returns a finding; none looks for itself."""

import re
from collections.abc import Mapping

from weft.engine.shared.messages import MachineFacts
from weft.server.terminal.finding import Finding, Severity, gigabytes

_COMPILER_ADVICE = "install GCC 11 or newer and Python's headers (Debian: apt install gcc libc6-dev python3-dev)"
_SHOWN_PACKAGES = ("torch", "transformers", "tokenizers")


def check_python(version: str, wanted: str) -> Finding:
    """The interpreter against the range of the package, such as ">=3.11"."""
    if is_within(version, wanted):
        return Finding("Python", "ok", f"{version} ({wanted})")
    return Finding("Python", "missing", f"{version} ({wanted})", f"make a virtual environment with Python {wanted}")


def check_packages(requirements: list[str], installed: Mapping[str, str | None]) -> list[Finding]:
    """Versions by name, None where there is none, against requirements such as "torch>=2.11"; extras are left out."""
    findings, num_others = [], 0
    for requirement in requirements:
        if "extra ==" in requirement:
            continue
        name, wanted = split_requirement(requirement)
        version = installed[name]
        if version is None or not is_within(version, wanted):
            detail = f"{version or 'not installed'} ({wanted})"
            findings.append(Finding(name, "missing", detail, f"pip install '{requirement}'"))
        elif name in _SHOWN_PACKAGES:
            findings.append(Finding(name, "ok", f"{version} ({wanted})"))
        else:
            num_others += 1
    return [*findings, Finding("other packages", "ok", f"{num_others} of the right version")]


def split_requirement(requirement: str) -> tuple[str, str]:
    """Name and range of a requirement without a marker, its extras left out."""
    match = re.match(r"([\w.-]+)(?:\[[^]]*\])?\s*([^;]*)", requirement)
    assert match is not None, requirement
    return match[1], match[2].strip()


def is_within(version: str, wanted: str) -> bool:
    """Whether a version is in a range of >= and <, such as ">=1.9,<2"."""
    bounds = re.findall(r"(>=|<)\s*([\d.]+)", wanted)
    have = _numbers(version)
    return all(have >= _numbers(bound) if sign == ">=" else have < _numbers(bound) for sign, bound in bounds)


def _numbers(version: str) -> tuple[int, ...]:
    """2.13.0+cpu -> (2, 13)."""
    numbers = [int(number) for number in re.findall(r"\d+", re.split(r"[^\d.]", version)[0])]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def check_kernels(facts: MachineFacts) -> Finding:
    """Weft's own CPU kernels."""
    if facts.native:
        others = ", ".join(name for name in facts.compiled if name != facts.native)
        return Finding("native kernels", "ok", f"{facts.native} is used (compiled, too: {others or 'none'})")
    slower = "models on the CPU take torch's operations, which are slower"
    if facts.compiled:
        advice = "where the CPU has AVX2 or more, install Weft again: their source may have changed since"
        return Finding("native kernels", "note", f"none of {', '.join(facts.compiled)} runs here: {slower}", advice)
    advice = f"{_COMPILER_ADVICE}, then install Weft again"
    return Finding("native kernels", "note", f"not compiled: {slower}", advice)


def check_compiler(compiler: str | None, has_headers: bool, facts: MachineFacts) -> Finding:
    """The C compiler, of which Weft makes use at installation, and Triton while it runs."""
    lacking = [] if compiler else ["no C compiler"]
    lacking += [] if has_headers else ["no headers of Python"]
    if not lacking:
        return Finding("compiler", "ok", f"{compiler}, with Python's headers")
    if facts.native and not facts.cuda_devices:
        return Finding("compiler", "ok", f"{' and '.join(lacking)}, and no need: the native kernels are compiled")
    return Finding("compiler", "note", " and ".join(lacking), _COMPILER_ADVICE)


def check_cuda(facts: MachineFacts, driver: str | None, device: str) -> list[Finding]:
    """Version of NVIDIA's driver (None for none), torch's build and its devices against the setting `device`."""
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
    """Triton, which torch for CUDA comes with."""
    if version is None:
        return Finding("Triton", "note", "not installed", "pip install triton")
    return Finding("Triton", "ok", f"{version}; compiles its kernels when they are first used")
