from collections.abc import Iterator

import pytest

from tests.server.cli.scripted_server import Script, serving


@pytest.fixture
def script() -> Iterator[Script]:
    with serving(Script()) as script:
        yield script
