"""How a child process finds these benchmarks, which are not installed."""

import os
import pathlib

ROOT = pathlib.Path(__file__).parents[1]


def environment() -> dict[str, str]:
    """This process's environment, with the repository on PYTHONPATH."""
    path = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
