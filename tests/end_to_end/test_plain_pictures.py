"""A family's own template and processor, in the process that reads pictures, through `weft serve`."""

from pathlib import Path

import pytest

from tests.end_to_end.conftest import serving
from tests.end_to_end.test_pictures import LARGE, SIGN, SMALL, TALL, Seeing, part, text
from tests.further_picture_checkpoints import FURTHER
from tests.plain_picture_checkpoints import PLAIN


@pytest.mark.parametrize("name", ["aya_vision", "mistral3"])
def test_a_chat_with_three_pictures(name: str, tmp_path: Path) -> None:
    """Pixtral's processor is loaded without torchvision; the sign of Aya's template does not stand in the prompt."""
    model = (PLAIN | FURTHER)[name].write(tmp_path / "m")
    options = "--dtype", "float32", "--kv-cache-memory", "8MB", "--served-model-name", "m"
    environment = {"WEFT_SERVER_PROCESSES": "1"}
    with serving(tmp_path / "log", str(tmp_path / "m"), *options, **environment) as server:
        seeing = Seeing(server, tmp_path / "m", model)
        with seeing.openai:
            said = seeing.said(text("see"), part(LARGE), text("and"), part(TALL), part(SMALL), text("what?"))
    content = [text("see"), SIGN, text("and"), SIGN, SIGN, text("what?")]
    assert said == seeing.wanted([{"role": "user", "content": content}], [LARGE, TALL, SMALL])
