import pytest

from weft.engine.speculation import speculator


@pytest.fixture
def cheap_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A price that does not hang on how fast this machine is at the moment."""
    monkeypatch.setattr(speculator, "price_of_drafts", lambda cost, contexts: (0.05, 1.0))
