import pytest

from weft.engine.shared.messages import CudaDevice, MachineFacts
from weft.server.terminal.check_software import (
    check_compiler,
    check_cuda,
    check_kernels,
    check_packages,
    check_python,
    check_triton,
    is_within,
    split_requirement,
)
from weft.server.terminal.finding import Finding

CPU = MachineFacts(None, (), 8_000_000_000, ("amx", "avx2"), "avx2")
BARE = MachineFacts("12.8", (), 8_000_000_000, (), None)
GPU = MachineFacts("12.8", (CudaDevice("H200", "9.0", 139_500_000_000),), 8_000_000_000, (), None)


@pytest.mark.parametrize(
    ("version", "wanted", "is_in"),
    [
        ("2.13.0+cpu", ">=2.11", True),
        ("2.9.1", ">=2.11", False),
        ("3.0.0", ">=3", True),
        ("2", ">=2.0,<3", True),
        ("3.0", ">=2.0,<3", False),
        ("1.9rc1", ">=1.9", True),
        ("1.0", "", True),
    ],
)
def test_versions_are_compared_by_number(version: str, wanted: str, is_in: bool) -> None:
    assert is_within(version, wanted) is is_in


def test_python_must_be_new_enough() -> None:
    assert check_python("3.11.7", ">=3.11") == Finding("Python", "ok", "3.11.7 (>=3.11)")
    assert check_python("3.9.2", ">=3.11").status == "missing"


def test_requirements_have_names_and_ranges() -> None:
    assert split_requirement("uvicorn[standard]>=0.38") == ("uvicorn", ">=0.38")
    assert split_requirement("types-PyYAML; extra == 'test'") == ("types-PyYAML", "")


def test_packages_that_lack_or_are_too_old_are_named() -> None:
    requirements = ["torch>=2.11", "rich>=14", "tokenizers>=0.22", "typer>=0.16", 'pytest>=8; extra == "test"']
    found = check_packages(requirements, {"torch": "2.10.0+cpu", "rich": "15.0", "tokenizers": "0.23", "typer": None})
    assert found == [
        Finding("torch", "missing", "2.10.0+cpu (>=2.11)", "pip install 'torch>=2.11'"),
        Finding("tokenizers", "ok", "0.23 (>=0.22)"),
        Finding("typer", "missing", "not installed (>=0.16)", "pip install 'typer>=0.16'"),
        Finding("other packages", "ok", "1 of the right version"),
    ]


def test_kernels_are_used_or_not_and_why() -> None:
    assert check_kernels(CPU) == Finding("native kernels", "ok", "avx2 is used (compiled, too: amx)")
    unfit = check_kernels(MachineFacts(None, (), 1, ("amx",), None))
    assert unfit.status == "note"
    assert unfit.detail.startswith("none of amx runs here")
    assert check_kernels(BARE).status == "note"
    assert "GCC 11" in check_kernels(BARE).advice


def test_a_compiler_is_missed_where_it_is_of_use() -> None:
    assert check_compiler("cc 12.2.0", True, BARE) == Finding("compiler", "ok", "cc 12.2.0, with Python's headers")
    assert check_compiler(None, True, CPU).status == "ok"
    finding = check_compiler(None, False, BARE)
    assert (finding.status, finding.detail) == ("note", "no C compiler and no headers of Python")
    assert check_compiler("cc", False, GPU).detail == "no headers of Python"


def test_a_gpu_is_described() -> None:
    detail = "H200, compute capability 9.0, 139.5 GB free; driver 570.1, torch for CUDA 12.8"
    assert check_cuda(GPU, "570.1", "auto") == [Finding("CUDA", "ok", detail)]


@pytest.mark.parametrize(
    ("facts", "driver", "detail"),
    [
        (CPU, None, "no NVIDIA driver: models run on the CPU"),
        (CPU, "570.1", "driver 570.1, but this torch is a build for the CPU"),
        (BARE, "570.1", "driver 570.1 and torch for CUDA 12.8, but torch finds no device"),
    ],
)
def test_no_gpu_is_a_fault_only_if_it_is_asked_for(facts: MachineFacts, driver: str | None, detail: str) -> None:
    (unasked,), (asked,) = check_cuda(facts, driver, "auto"), check_cuda(facts, driver, "cuda")
    assert (unasked.status, unasked.detail) == ("note", detail)
    assert (asked.status, asked.detail) == ("missing", detail)
    assert asked.advice


def test_triton() -> None:
    assert check_triton("3.5.0").status == "ok"
    assert check_triton(None).status == "note"
