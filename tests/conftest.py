import gc
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# How long an example takes says something of the machine, nothing of the code.
settings.register_profile("weft", deadline=None)
settings.load_profile("weft")

# Models that the user has fetched are none of the tests' business. Nobody makes this folder.
for folder in ("HF_HOME", "XDG_DATA_HOME"):
    os.environ[folder] = str(Path(tempfile.gettempdir()) / "weft-tests-without-models")

# nohup and a shell's background jobs ignore them, and so would every process that a test starts and signals.
for signum in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(signum) == signal.SIG_IGN:
        signal.signal(signum, lambda *_: None)


# What collection makes stays until the end: a fifth of the suite's time went into looking for garbage among it.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--traffic-seconds", type=float, default=180.0, help="how long the GPU is given random traffic")
    parser.addoption("--long-faults", action="store_true", help="tests/faults at full size, for minutes")
    parser.addoption("--whole-real", action="store_true", help="tests/real at full size, for minutes")
    parser.addoption("--write-lock", action="store_true", help="store what tests/end_to_end/test_lock.py compares")


@pytest.fixture(autouse=True, scope="session")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where engines keep what they settle; the user's own choices decide nothing here, and stay as they are."""
    folder, before = tmp_path_factory.mktemp("cache"), os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(folder)
    yield folder
    os.environ.pop("XDG_CACHE_HOME")
    if before is not None:
        os.environ["XDG_CACHE_HOME"] = before


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked gpu on a machine without CUDA; torch is asked only if there is anything to skip."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked:
        import torch

        if not torch.cuda.is_available():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
