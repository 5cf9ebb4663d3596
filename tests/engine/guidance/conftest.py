from collections.abc import Callable

import pytest

from tests.engine.guidance.demo import DEMO_MODEL
from weft.engine.loop.engine import Engine
from weft.engine.start.startup import start
from weft.engine.wire.messages import EngineOptions


@pytest.fixture(scope="session")
def make_demo_engine() -> Callable[..., Engine]:
    """Engines around the demo model."""

    def make(**options: object) -> Engine:
        values = {"device": "cpu", "kv_cache_memory": 8 << 20, **options}
        return start(EngineOptions(model=str(DEMO_MODEL), **values), "test").engine  # type: ignore[arg-type]

    return make


@pytest.fixture(scope="session")
def demo_engine(make_demo_engine: Callable[..., Engine]) -> Engine:
    return make_demo_engine()
