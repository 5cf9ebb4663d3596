import errno
import resource

import pytest

from weft.engine.wire import errors as limits


def chained(outer: Exception, inner: Exception) -> Exception:
    outer.__cause__ = inner
    return outer


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "memory ran out; "),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "memory ran out; "),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), "memory ran out; "),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to"), "memory ran out; "),
        (OSError(errno.EMFILE, "Too many open files"), "too many open files; "),
        (RuntimeError("can't start new thread"), "no process or thread can be started; "),
        (chained(RuntimeError("no model"), MemoryError()), "memory ran out; "),
    ],
    ids=str,
)
def test_a_limit_behind_an_error_is_named(error: Exception, words: str) -> None:
    line = limits.explain(error)
    assert line is not None
    assert line.startswith(words)
    assert "\n" not in line


@pytest.mark.parametrize("error", [RuntimeError("wrong shape"), FileNotFoundError(errno.ENOENT, "no such file"), None])
def test_other_errors_are_left_alone(error: Exception | None) -> None:
    assert limits.explain(error) is None


def test_what_is_set_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    soft = {resource.RLIMIT_AS: 2_000_000_000, resource.RLIMIT_NOFILE: 64, resource.RLIMIT_NPROC: 100}
    monkeypatch.setattr(resource, "getrlimit", lambda name: (soft.get(name, resource.RLIM_INFINITY), 0))
    files = {"/sys/fs/cgroup/memory.max": "512000000\n", "/proc/meminfo": "MemTotal: 9 kB\nMemAvailable:  1000000 kB\n"}
    monkeypatch.setattr(limits, "_read", files.__getitem__)
    assert limits.describe() == (
        "address space is limited to 2,000 MB (ulimit -v), this control group is limited to 512 MB, 1,024 MB are free; "
        "64 files may be open (ulimit -n); 100 processes may run (ulimit -u)"
    )


def test_what_is_not_set_is_not_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda name: (resource.RLIM_INFINITY, 0))
    files = {"/sys/fs/cgroup/memory.max": "max\n", "/proc/meminfo": "MemAvailable:  1000000 kB\n"}
    monkeypatch.setattr(limits, "_read", files.__getitem__)
    assert limits.memory() == "1,024 MB are free"
