"""What the machine lets a process have, in words: for the line that says why something cannot start.

Both sides of Weft use it. Imports only the standard library, so that it works where little else does.
"""

import errno
import pathlib
import resource

_NO_MEMORY_WORDS = ("failed to map segment", "annot allocate memory", "an't allocate memory", "bad_alloc")
"""Of the dynamic loader, libc, torch and C++, which raise errors of any kind."""


def explain(error: BaseException | None) -> str | None:
    """One line if a limit is behind an error, or behind what was being handled when it arose; else None."""
    while error is not None:
        number = error.errno if isinstance(error, OSError) else None
        text = str(error)
        if number in (errno.EMFILE, errno.ENFILE):
            return f"too many open files; {_files()}"
        if "can't start new thread" in text:
            return f"no process or thread can be started; {_processes()}; {memory()}"
        if number == errno.ENOMEM or isinstance(error, MemoryError) or any(w in text for w in _NO_MEMORY_WORDS):
            return f"memory ran out; {memory()}"
        error = error.__cause__ or error.__context__
    return None


def describe() -> str:
    """All limits that a process may meet while it starts."""
    return f"{memory()}; {_files()}; {_processes()}"


def memory() -> str:
    """The limits of memory that are set, and what is free."""
    facts = []
    for name, what, flag in ((resource.RLIMIT_AS, "address space", "v"), (resource.RLIMIT_DATA, "data", "d")):
        if (soft := resource.getrlimit(name)[0]) != resource.RLIM_INFINITY:
            facts.append(f"{what} is limited to {soft // 1_000_000:,} MB (ulimit -{flag})")
    if (limit := _read("/sys/fs/cgroup/memory.max").strip()).isdecimal():
        facts.append(f"this control group is limited to {int(limit) // 1_000_000:,} MB")
    free = [line.split()[1] for line in _read("/proc/meminfo").splitlines() if line.startswith("MemAvailable")]
    return ", ".join([*facts, *(f"{int(kilobytes) * 1024 // 1_000_000:,} MB are free" for kilobytes in free)])


def _files() -> str:
    return f"{resource.getrlimit(resource.RLIMIT_NOFILE)[0]} files may be open (ulimit -n)"


def _processes() -> str:
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    return f"{'any number of' if soft == resource.RLIM_INFINITY else soft} processes may run (ulimit -u)"


def _read(path: str) -> str:
    """A file's text; empty without one, or without a free number for it."""
    try:
        return pathlib.Path(path).read_text()
    except OSError:
        return ""
