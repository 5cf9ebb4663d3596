"""A GGUF model and the mmproj file beside it, through `weft serve`: answers about pictures are those of transformers."""

import base64
from pathlib import Path

import httpx
import pytest

from tests.end_to_end.conftest import serving
from tests.mmproj_files import write_halves
from tests.picture_checkpoints import encoded, expected, picture, processor_of

NUM_IDS = 6


@pytest.mark.parametrize("name", ["idefics3"])
def test_a_chat_about_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    model, file, _ = write_halves(name, tmp_path)
    images = [picture(1, 80, 50), picture(3, 20, 20)]
    said = [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image"}, {"type": "text", "text": "what?"}]
    processor = processor_of(tmp_path / "whole")
    text = processor.apply_chat_template(
        [{"role": "user", "content": said}], add_generation_prompt=True, tokenize=False
    )
    made, ids = expected(model, tmp_path / "whole", text, images, NUM_IDS)
    shown = iter(images)
    content = [
        each
        if each["type"] == "text"
        else {
            "type": "image_url",
            "image_url": {"url": f"data:image/png;base64,{base64.b64encode(encoded(next(shown))).decode()}"},
        }
        for each in said
    ]
    options = "--dtype", "float32", "--kv-cache-memory", "8MB", "--served-model-name", "m"
    environment = {"WEFT_SERVER_PROCESSES": "1", "WEFT_PICTURES": "true", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    with serving(tmp_path / "log", str(file), *options, **environment) as server:
        body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": NUM_IDS}
        reply = httpx.post(f"{server.base_url}/v1/chat/completions", json=body, timeout=100).json()
    assert reply["usage"]["prompt_tokens"] == made["input_ids"].shape[1]
    assert reply["choices"][0]["message"]["content"] == processor.tokenizer.decode(ids, skip_special_tokens=True)
