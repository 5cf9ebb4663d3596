import msgspec
import pytest
from packaging.requirements import Requirement

from weft.engine.wire.machine import CudaDevice, KernelChoice, MachineFacts, Verdict
from weft.server.cli.doctor import (
    Finding,
    check_choices,
    check_compiler,
    check_cuda,
    check_kernels,
    check_packages,
    check_python,
    check_triton,
)

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
        ("1.9rc1", ">=1.9", False),
        ("2.13.0.dev20261101", ">=2.11", True),
        ("1.0", "", True),
    ],
)
def test_versions_are_compared_by_number(version: str, wanted: str, is_in: bool) -> None:
    assert check_python(version, wanted).status == ("ok" if is_in else "missing")
    found = check_packages([Requirement(f"torch{wanted}")], {"torch": version})
    assert found[0].status == ("ok" if is_in else "missing")


def test_python_must_be_new_enough() -> None:
    assert check_python("3.11.7", ">=3.11") == Finding("Python", "ok", "3.11.7 (>=3.11)")
    assert check_python("3.9.2", ">=3.11").status == "missing"


def test_packages_that_lack_or_are_too_old_are_named() -> None:
    texts = ["torch>=2.11", "rich>=14", "tokenizers>=0.22", "typer>=0.16", "uvicorn[standard]>=0.38"]
    versions = {"torch": "2.10.0+cpu", "rich": "15.0", "tokenizers": "0.23", "typer": None, "uvicorn": "0.38"}
    assert check_packages([Requirement(text) for text in texts], versions) == [
        Finding("torch", "missing", "2.10.0+cpu (>=2.11)", "pip install 'torch>=2.11'"),
        Finding("tokenizers", "ok", "0.23 (>=0.22)"),
        Finding("typer", "missing", "not installed (>=0.16)", "pip install 'typer>=0.16'"),
        Finding("other packages", "ok", "2 of the right version"),
    ]


def test_choices_are_listed_and_wrong_kernels_noted() -> None:
    right = Verdict("triton", seconds=0.0004, error=0.006), Verdict("flash2", seconds=0.0005, error=0.004)
    wrong = Verdict("triton", error=0.9, fault="wrong: its error is 0.9, more than 0.04")
    missing = Verdict("flash3", fault="not installed")
    choices = (
        KernelChoice("prefill_attention", "32 heads", ("triton", "flash2", "flash3"), "triton", (*right, missing)),
        KernelChoice("sampler", "vocabulary of 9", ("triton", "torch"), "torch", (wrong,)),
    )
    assert check_choices(msgspec.structs.replace(GPU, settled=choices)) == [
        Finding("prefill_attention", "ok", "triton 0.400 ms; flash2 0.500 ms; flash3: not installed (32 heads)"),
        Finding(
            "sampler",
            "note",
            "torch; triton: wrong: its error is 0.9, more than 0.04 (vocabulary of 9)",
            "triton gives wrong results here and is not used; another version of torch or of the driver may help",
        ),
    ]
    assert check_choices(GPU) == []


def test_kernels_are_used_or_not_and_why() -> None:
    assert check_kernels(CPU) == Finding("native kernels", "ok", "avx2 is used (also compiled: amx)")
    alone = check_kernels(MachineFacts(None, (), 1, ("avx2",), "avx2"))
    assert alone == Finding("native kernels", "ok", "avx2 is used"), "a checkout has one"
    unfit = check_kernels(MachineFacts(None, (), 1, ("amx",), None))
    assert unfit.status == "note"
    assert unfit.detail.startswith("none of amx runs here")
    assert "install Weft again" in unfit.advice
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
