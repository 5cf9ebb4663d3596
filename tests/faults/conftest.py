"""Faults from outside: hung processes, endless requests, full disks, low limits. `make faults` runs the long form."""

import pytest

from tests.end_to_end.conftest import live_server, long_model, serve

__all__ = ["live_server", "long_model", "serve"]


@pytest.fixture(scope="session")
def is_long(request: pytest.FixtureRequest) -> bool:
    """Whether to go on for minutes and at full size, as `make faults` asks; the short form takes seconds."""
    return bool(request.config.getoption("--long-faults"))
