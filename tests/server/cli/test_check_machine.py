import pytest

from weft.server.cli.doctor import (
    Finding,
    check_folder,
    check_hub,
    check_memory,
    check_open_files,
    check_port,
    check_runtime_folder,
    check_shared_memory,
)

GB = 10**9


def test_memory_is_held_against_the_weights() -> None:
    assert check_memory(8 * GB, 0) == Finding("memory", "ok", "8.0 GB free")
    tight = check_memory(8 * GB, 16 * GB)
    assert (tight.status, tight.detail) == ("note", "8.0 GB free, and the files of the weights take 16.0 GB")
    assert check_memory(GB // 2, 0).status == "note"


def test_a_port_must_be_free() -> None:
    assert check_port("::1", 80, None) == Finding("port", "ok", "::1 port 80 is free")
    taken = check_port("::1", 80, "address already in use")
    assert (taken.status, taken.detail) == ("missing", "address already in use")


def test_a_folder_must_hold_a_model() -> None:
    """Parts were not counted, and weights that Weft reads were refused."""
    names = ["config.json", "tokenizer.json", "model-00002-of-00002.safetensors"]
    half = check_folder("/m", names)
    assert (half.status, half.detail) == ("missing", "/m has no model-00001-of-00002.safetensors")
    whole = [*names, "model-00001-of-00002.safetensors"]
    assert check_folder("/m", whole) == Finding("model", "ok", "/m")
    assert check_folder("/m", ["config.json", "vocab.json", "merges.txt", "pytorch_model.bin"]).status == "ok"
    bare = check_folder("/m", ["tokenizer.json"])
    assert (bare.status, bare.detail) == ("missing", "/m has no config.json, no weights (*.safetensors)")


@pytest.mark.parametrize(
    ("answer", "is_cached", "status", "detail"),
    [
        (200, False, "ok", "o/m is on the hub"),
        (200, True, "ok", "o/m is on the hub and in the cache"),
        ("timed out", True, "note", "o/m is in the cache; the hub says timed out"),
        ("timed out", False, "missing", "o/m: the hub cannot be reached (timed out)"),
        (401, False, "missing", "o/m: the hub answers 401"),
        (500, False, "missing", "o/m: the hub answers 500"),
    ],
)
def test_a_hub_id_wants_the_hub_or_the_cache(answer: int | str, is_cached: bool, status: str, detail: str) -> None:
    finding = check_hub("o/m", answer, is_cached)
    assert (finding.status, finding.detail) == (status, detail)
    assert bool(finding.advice) == (status != "ok")


def test_shared_memory_is_noted() -> None:
    assert check_shared_memory(2 * GB).status == "ok"
    assert check_shared_memory(None).detail == "cannot be written to"
    assert check_shared_memory(32 << 20).detail == "32 MiB free"


def test_the_limit_of_open_files_covers_those_that_wait() -> None:
    assert check_open_files(1451, 1024).status == "ok"  # three quarters of them are for connections
    finding = check_open_files(1450, 1024)
    assert (finding.status, finding.advice) == ("note", "a hard limit of 2048 (ulimit -Hn) for weft serve")


def test_the_runtime_folder_must_take_a_page_and_sockets() -> None:
    assert check_runtime_folder("/run", GB) == Finding("runtime folder", "ok", "/run")
    assert check_runtime_folder("/run", None).detail == "/run cannot be written to"
    full = check_runtime_folder("/run", 4096)
    assert (full.status, full.detail) == ("missing", "/run has 4 KiB left")
