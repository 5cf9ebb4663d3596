"""Real models, tokenizers and templates: in the folder that WEFT_REAL names, or ~/.cache/weft-real; see fetch.py.

A test that needs them has the marker `real` and skips without them. `make test` runs its short form, which takes
seconds; `make real` fetches them and runs the whole form.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.real.fetch import default_folder


@pytest.fixture(scope="session")
def real_folder() -> Path:
    """The folder of real files; skips without it."""
    folder = default_folder()
    if not folder.is_dir():
        pytest.skip(f"no real models in {folder}; `make real` fetches them")
    return folder


@pytest.fixture(scope="session")
def real_path(real_folder: Path) -> Callable[[str], Path]:
    """Finds one of them by its name in `fetch.ITEMS`, or a path within; skips if it was not fetched."""

    def find(name: str) -> Path:
        if not (path := real_folder / name).exists():
            pytest.skip(f"no {name} in {real_folder}; `make real` fetches it")
        return path

    return find


@pytest.fixture(scope="session")
def is_whole(request: pytest.FixtureRequest) -> bool:
    """Whether to try everything at full size, for minutes, as `make real` asks."""
    return bool(request.config.getoption("--whole-real"))
