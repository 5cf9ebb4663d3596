"""The process that measures one group of rows: python -m benchmarks.gpu.worker JOB.json

Each group has a process of its own, so that it begins with an empty device, can be ended when its time is over, and a
fault in it (an illegal memory access spoils the whole process) costs no row of another. What it finds, it appends to a
file, message by message, so that the rows that were complete survive it.
"""

import importlib
import os
import pathlib
import signal
import sys
import traceback

from benchmarks.gpu.job import Job, Reporter, UnavailableError

MODULES = {
    "ceilings": "ceilings",
    "engine": "in_process",
    "attention": "attention",
    "deterministic": "in_process",
    "small": "in_process",
    "http": "over_http",
    "ready": "ready",
    "vllm": "over_http",
    "peer": "peer",
}
"""Group -> the module of this package whose `run(job, reporter)` measures it."""


def _end(signum: int, frame: object) -> None:
    """Unwind, so that a server that was started ends as well."""
    sys.exit(128 + signum)


def main() -> int:
    """Measure; the exit code is 1 when something failed, not when it cannot be measured here."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    signal.signal(signal.SIGTERM, _end)
    job = Job.read(pathlib.Path(sys.argv[1]))
    reporter = Reporter(job.messages)
    why, code = "it failed", 0
    try:
        importlib.import_module(f"benchmarks.gpu.{MODULES[job.group]}").run(job, reporter)
    except UnavailableError as error:
        why = str(error)
    except Exception as error:
        traceback.print_exc()
        why, code = f"{type(error).__name__}: {error}".splitlines()[0], 1
    for row in job.rows:
        if row not in reporter.reported:
            reporter.unavailable(row, why)
    return code


if __name__ == "__main__":
    sys.exit(main())
