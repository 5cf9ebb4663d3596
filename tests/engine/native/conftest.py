import pytest

from engine.native.library import NativeLibrary, load, runnable_variants


@pytest.fixture(params=list(runnable_variants()))
def library(request: pytest.FixtureRequest) -> NativeLibrary:
    """Each instruction set that was compiled and that this machine runs."""
    loaded = load(request.param)
    assert loaded is not None
    return loaded
