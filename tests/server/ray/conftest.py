from collections.abc import Iterator

import pytest

from weft.server.ray import deploy as environment


@pytest.fixture(scope="session", autouse=True)
def ray_environment() -> Iterator[None]:
    """Ray reads it when it is first imported, by whichever test."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (environment.RAY | environment.SERVE).items():
            patch.setenv(name, value)
        yield
