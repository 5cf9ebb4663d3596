"""Pictures for Gemma through `weft serve`: what its template writes for one is not the token that stands for it."""

from pathlib import Path

import pytest

from tests.end_to_end.conftest import serving
from tests.end_to_end.test_pictures import LARGE, SIGN, SMALL, TALL, Seeing, part, text
from tests.gemma_picture_checkpoints import WRITERS


@pytest.mark.parametrize("name", ["gemma3, window within a picture", "gemma4, window within a picture"])
def test_a_chat_with_pictures(name: str, tmp_path: Path) -> None:
    """Three in one message, side by side too, and one of them again in a second turn."""
    model = WRITERS[name](tmp_path / "model")
    options = "--dtype", "float32", "--kv-cache-memory", "8MB", "--served-model-name", "m"
    with serving(tmp_path / "log", str(tmp_path / "model"), *options, WEFT_SERVER_PROCESSES="1") as server:
        seeing = Seeing(server, tmp_path / "model", model)
        with seeing.openai:
            content = [text("see"), SIGN, text("and"), SIGN, SIGN, text("what?")]
            wanted = seeing.wanted([{"role": "user", "content": content}], [LARGE, TALL, SMALL])
            shown = text("see"), part(LARGE), text("and"), part(TALL), part(SMALL), text("what?")
            assert seeing.said(*shown) == wanted
            again = seeing.wanted([{"role": "user", "content": [*content[:2], text("again?")]}], [LARGE])
            assert seeing.said(*shown[:2], text("again?")) == again
