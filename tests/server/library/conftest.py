from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import constants
import pytest

from tests.hub_mirror import Mirror, hub_mirror


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
    """A mirror of the hub, for this process too, and an empty library."""
    with hub_mirror() as mirror:
        for name, value in mirror.environment(tmp_path).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(constants, "ENDPOINT", mirror.url)
        template = f"{mirror.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
        monkeypatch.setattr("weft.server.library.download._PAUSE_S", 0.0)
        yield mirror
