from collections.abc import Callable

import llguidance
import pytest

from tests.engine.guidance.demo import DEMO_MODEL
from weft.engine.core.engine import Engine
from weft.engine.run.startup import start
from weft.engine.shared.messages import EngineOptions


@pytest.fixture(scope="session")
def vocabulary() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer((DEMO_MODEL / "tokenizer.json").read_text(), eos_token=[0])


@pytest.fixture(scope="session")
def make_demo_engine() -> Callable[..., Engine]:
    """Engines around the demo model."""

    def make(**options: object) -> Engine:
        values = {"device": "cpu", "kv_cache_memory_bytes": 8 << 20, **options}
        return start(EngineOptions(model=str(DEMO_MODEL), **values), "test").engine  # type: ignore[arg-type]

    return make


@pytest.fixture(scope="session")
def demo_engine(make_demo_engine: Callable[..., Engine]) -> Engine:
    return make_demo_engine()
