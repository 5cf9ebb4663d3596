"""Pictures that layers attend to (Llama 3.2 Vision), through `weft serve`."""

from collections.abc import Iterator
from typing import Any

import pytest
from PIL import Image
from typing_extensions import override

from tests.end_to_end.conftest import serving
from tests.end_to_end.test_pictures import LARGE, NUM_IDS, SIGN, SMALL, TALL, Seeing, part, text
from tests.mllama_picture_checkpoints import answered, write_mllama


class Attending(Seeing):
    @override
    def wanted(self, messages: list[dict[str, Any]], images: list[Image.Image]) -> tuple[int, str]:
        """Tokens of the prompt, and the text of the answer; see `answered`."""
        prompt = self.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        made, ids = answered(self.model, self.folder, prompt, images, NUM_IDS)
        return made["input_ids"].shape[1], self.processor.tokenizer.decode(ids, skip_special_tokens=True)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeing]:
    folder = tmp_path_factory.mktemp("mllama")
    model = write_mllama(folder)
    log = tmp_path_factory.mktemp("log") / "log"
    options = "--dtype", "float32", "--kv-cache-memory", "8MB", "--served-model-name", "m"
    with serving(log, str(folder), *options, WEFT_SERVER_PROCESSES="1", WEFT_PICTURES="true") as server:
        found = Attending(server, folder, model)
        with found.openai:
            yield found


def test_a_chat_with_three_pictures(seeing: Seeing) -> None:
    """A picture is one token of the prompt."""
    content = [text("see"), SIGN, text("and"), SIGN, SIGN, text("what?")]
    wanted = seeing.wanted([{"role": "user", "content": content}], [LARGE, TALL, SMALL])
    assert seeing.said(text("see"), part(LARGE), text("and"), part(TALL), part(SMALL), text("what?")) == wanted


def test_a_chat_with_more_pictures_than_there_are_places_for(seeing: Seeing) -> None:
    body = {"type": "image_url", "image_url": part(SMALL)["image_url"]}
    reply = seeing.openai.with_options(max_retries=0)
    with pytest.raises(Exception, match="at most 8 pictures for this model, got 9"):
        reply.chat.completions.create(model="m", messages=[{"role": "user", "content": [body] * 9}], max_tokens=1)  # type: ignore[list-item]
