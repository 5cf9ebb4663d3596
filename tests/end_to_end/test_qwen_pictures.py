"""Pictures with rows and columns through `weft serve`: the server tells the engine how many, as Qwen's models need."""

from collections.abc import Iterator

import pytest

from tests.end_to_end.conftest import serving
from tests.end_to_end.test_pictures import LARGE, SIGN, SMALL, TALL, Seeing, part, text
from tests.qwen_picture_checkpoints import write_qwen3_vl


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeing]:
    folder, log = tmp_path_factory.mktemp("qwen3_vl"), tmp_path_factory.mktemp("log") / "log"
    model = write_qwen3_vl(folder)
    options = "--dtype", "float32", "--kv-cache-memory", "8MB", "--served-model-name", "m"
    with serving(log, str(folder), *options, WEFT_SERVER_PROCESSES="1") as server:
        found = Seeing(server, folder, model)
        with found.openai:
            yield found


def test_a_chat_with_pictures_between_words(seeing: Seeing) -> None:
    """The template writes a picture between two signs of its own, and the processor makes more of the one between."""
    content = [text("see"), SIGN, text("and"), SIGN, SIGN, text("what?")]
    wanted = seeing.wanted([{"role": "user", "content": content}], [LARGE, TALL, SMALL])
    assert seeing.said(text("see"), part(LARGE), text("and"), part(TALL), part(SMALL), text("what?")) == wanted


def test_the_same_pictures_in_another_order_are_others(seeing: Seeing) -> None:
    wanted = seeing.wanted([{"role": "user", "content": [SIGN, SIGN, text("what?")]}], [TALL, LARGE])
    assert seeing.said(part(TALL), part(LARGE), text("what?")) == wanted
    wanted = seeing.wanted([{"role": "user", "content": [SIGN, SIGN, text("what?")]}], [LARGE, TALL])
    assert seeing.said(part(LARGE), part(TALL), text("what?")) == wanted
