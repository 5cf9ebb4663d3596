"""A GGUF model and the mmproj file beside it, through `weft serve`: a picture is answered as transformers does."""

import base64
from pathlib import Path

import httpx
from PIL import Image

from tests.end_to_end.conftest import serving
from tests.mmproj_files import write_halves
from tests.picture_checkpoints import encoded, expected, picture, processor_of

NUM_IDS = 6


def text(words: str) -> dict[str, object]:
    return {"type": "text", "text": words}


def part(image: Image.Image) -> dict[str, object]:
    url = f"data:image/png;base64,{base64.b64encode(encoded(image)).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def test_a_chat_about_pictures(tmp_path: Path) -> None:
    model, file, _ = write_halves("idefics3", tmp_path)
    first, second, sign = picture(1, 80, 50), picture(3, 20, 20), {"type": "image"}
    said = [{"role": "user", "content": [sign, text("and"), sign, text("what?")]}]
    processor = processor_of(tmp_path / "whole")
    prompt = processor.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
    made, ids = expected(model, tmp_path / "whole", prompt, [first, second], NUM_IDS)
    shown = [{"role": "user", "content": [part(first), text("and"), part(second), text("what?")]}]
    options = "--dtype", "float32", "--kv-cache-memory", "8MB", "--served-model-name", "m"
    environment = {"WEFT_SERVER_PROCESSES": "1", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    with serving(tmp_path / "log", str(file), *options, **environment) as server:
        body = {"messages": shown, "temperature": 0, "max_tokens": NUM_IDS}
        reply = httpx.post(f"{server.base_url}/v1/chat/completions", json=body, timeout=100).json()
    assert reply["usage"]["prompt_tokens"] == made["input_ids"].shape[1]
    assert reply["choices"][0]["message"]["content"] == processor.tokenizer.decode(ids, skip_special_tokens=True)
