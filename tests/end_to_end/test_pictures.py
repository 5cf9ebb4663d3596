"""Pictures through `weft serve` and the SDKs of every API are answered as transformers' own processor and module do."""

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest
from PIL import Image
from transformers import PreTrainedModel
from transformers.image_utils import load_image

from tests.end_to_end.conftest import LiveServer, serving
from tests.picture_checkpoints import WRITERS, encoded, expected, picture, processor_of

NUM_IDS = 10
LARGE, TALL, SMALL = picture(1, 80, 50), picture(2, 31, 64), picture(3, 20, 20)


class Seeing:
    """A server, its model in transformers, and what both say."""

    def __init__(self, server: LiveServer, folder: Path, model: PreTrainedModel) -> None:
        self.server, self.folder, self.model = server, folder, model
        self.processor = processor_of(folder)
        self.openai = openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="x", max_retries=0)

    def wanted(self, messages: list[dict[str, Any]], images: list[Image.Image]) -> tuple[int, str]:
        """Tokens of the prompt, and the text of the answer."""
        text = self.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        made, ids = expected(self.model, self.folder, text, images, NUM_IDS)
        return made["input_ids"].shape[1], self.processor.tokenizer.decode(ids, skip_special_tokens=True)

    def said(self, *content: dict[str, Any]) -> tuple[int, str]:
        """The same of Weft's answer to one turn of chat."""
        reply = self.openai.chat.completions.create(
            model="m", messages=[{"role": "user", "content": [*content]}], temperature=0, max_tokens=NUM_IDS
        )  # type: ignore[call-overload]
        return reply.usage.prompt_tokens, reply.choices[0].message.content

    def refused(self, **part: Any) -> tuple[int, dict[str, Any]]:
        """Status and error of a chat with one part beside a text."""
        body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, part]}], "max_tokens": 1}
        reply = httpx.post(f"{self.server.base_url}/v1/chat/completions", json=body, timeout=100)
        return reply.status_code, reply.json()["error"]


@pytest.fixture(scope="module", params=["llava", "smolvlm"])
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeing]:
    folder = tmp_path_factory.mktemp(request.param)
    model = WRITERS[request.param](folder)
    log = tmp_path_factory.mktemp("log") / "log"
    options = "--dtype", "float32", "--kv-cache-memory", "8MB", "--served-model-name", "m"
    with serving(log, str(folder), *options, WEFT_SERVER_PROCESSES="1") as server:
        found = Seeing(server, folder, model)
        with found.openai:
            yield found


def url(image: Image.Image, format: str = "PNG", **options: Any) -> str:
    kind = format.lower()
    return f"data:image/{kind};base64,{base64.b64encode(encoded(image, format, **options)).decode()}"


def part(image: Image.Image) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(image), "detail": "auto"}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


SIGN = {"type": "image"}


def test_a_chat_with_three_pictures(seeing: Seeing) -> None:
    content = [text("see"), SIGN, text("and"), SIGN, SIGN, text("what?")]
    wanted = seeing.wanted([{"role": "user", "content": content}], [LARGE, TALL, SMALL])
    assert seeing.said(text("see"), part(LARGE), text("and"), part(TALL), part(SMALL), text("what?")) == wanted


def test_a_second_turn_finds_the_picture_in_the_cache(seeing: Seeing) -> None:
    question = "what is it? " * 12
    first = {"role": "user", "content": [part(SMALL), text(question)]}
    reply = seeing.openai.chat.completions.create(model="m", messages=[first], temperature=0, max_tokens=NUM_IDS)  # type: ignore[list-item]
    assert reply.usage is not None
    turns = [first, {"role": "assistant", "content": "well"}, {"role": "user", "content": "and now?"}]
    second = seeing.openai.chat.completions.create(model="m", messages=turns, temperature=0, max_tokens=NUM_IDS)  # type: ignore[arg-type]
    assert second.usage is not None and second.usage.prompt_tokens_details is not None
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) >= reply.usage.prompt_tokens // 32 * 32 - 32
    said = [
        {"role": "user", "content": [SIGN, text(question)]},
        {"role": "assistant", "content": [text("well")]},
        {"role": "user", "content": [text("and now?")]},
    ]
    assert (second.usage.prompt_tokens, second.choices[0].message.content) == seeing.wanted(said, [SMALL])


def test_every_api_shows_the_same(seeing: Seeing) -> None:
    wanted = seeing.wanted([{"role": "user", "content": [SIGN, text("what?")]}], [LARGE])
    assert seeing.said(part(LARGE), text("what?")) == wanted
    data = base64.b64encode(encoded(LARGE)).decode()
    shown = {"type": "input_image", "image_url": url(LARGE), "detail": "auto"}
    answer = seeing.openai.responses.create(
        model="m",
        input=[{"role": "user", "content": [shown, {"type": "input_text", "text": "what?"}]}],  # type: ignore[list-item]
        temperature=0,
        max_output_tokens=NUM_IDS,
    )
    assert answer.usage is not None and (answer.usage.input_tokens, answer.output_text) == wanted
    source = {"type": "base64", "media_type": "image/png", "data": data}
    turn: Any = {"role": "user", "content": [{"type": "image", "source": source}, text("what?")]}
    with anthropic.Anthropic(base_url=seeing.server.base_url, api_key="x") as client:
        message = client.messages.create(model="m", messages=[turn], max_tokens=NUM_IDS, extra_body={"temperature": 0})
        counted = client.messages.count_tokens(model="m", messages=[turn])
    num_tokens = message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
    assert (num_tokens, getattr(message.content[0], "text", "")) == wanted
    assert counted.input_tokens == wanted[0]
    with ollama.Client(seeing.server.base_url) as local:
        asked: dict[str, Any] = {"model": "m", "options": {"temperature": 0, "num_predict": NUM_IDS}}
        told = local.chat(messages=[{"role": "user", "content": "what?", "images": [encoded(LARGE)]}], **asked)
        assert (told.prompt_eval_count, told.message.content) == wanted
        made = local.generate(prompt="what?", images=[encoded(LARGE)], **asked)
        assert (made.prompt_eval_count, made.response) == wanted
        assert "vision" in (local.show("m").capabilities or ())
    body = {"messages": [{"role": "user", "content": [part(LARGE), text("what?")]}]}
    tokens = httpx.post(f"{seeing.server.base_url}/tokenize", json=body, timeout=100).json()
    assert tokens["count"] == wanted[0]
    assert seeing.openai.models.retrieve("m").model_extra["input_modalities"] == ["text", "image"]  # type: ignore[index]


def test_a_file_that_was_sent_may_be_named(seeing: Seeing) -> None:
    wanted = seeing.wanted([{"role": "user", "content": [SIGN, text("what?")]}], [TALL])
    file = seeing.openai.files.create(file=("x.png", io.BytesIO(encoded(TALL))), purpose="user_data")
    shown = {"type": "input_image", "file_id": file.id, "detail": "auto"}
    answer = seeing.openai.responses.create(
        model="m",
        input=[{"role": "user", "content": [shown, {"type": "input_text", "text": "what?"}]}],  # type: ignore[list-item]
        temperature=0,
        max_output_tokens=NUM_IDS,
    )
    assert answer.usage is not None and (answer.usage.input_tokens, answer.output_text) == wanted
    status, error = seeing.refused(type="image_url", file_id="file-none")
    assert (status, error["param"]) == (404, "messages[0].content[1]")


def test_every_way_to_store_a_picture_shows_the_same(seeing: Seeing) -> None:
    """Palettes, CMYK, transparency and turned pictures become what transformers' own loader makes of them."""
    turned = Image.Exif()
    turned[0x0112] = 6
    ways = {
        "palette": encoded(LARGE.convert("P")),
        "cmyk": encoded(LARGE.convert("CMYK"), "JPEG"),
        "alpha": encoded(LARGE.convert("RGBA"), "WEBP", lossless=True),
        "turned": encoded(LARGE, "JPEG", exif=turned),
        "tiny": encoded(picture(4, 1, 1)),
        "with a second one, as of a telephone": encoded(LARGE, "MPO", save_all=True, append_images=[SMALL]),
    }
    for name, data in ways.items():
        loaded = load_image(base64.b64encode(data).decode())
        wanted = seeing.wanted([{"role": "user", "content": [SIGN, text("what?")]}], [loaded])
        shown = {"type": "image_url", "image_url": {"url": f"data:;base64,{base64.b64encode(data).decode()}"}}
        assert seeing.said(shown, text("what?")) == wanted, name


def test_what_is_wrong_with_a_picture_is_told(seeing: Seeing) -> None:
    """And a good one after each of them is answered."""
    frames = [picture(i, 8, 8) for i in range(3)]
    animated = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    moving = encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:])
    bomb = encoded(Image.new("1", (20_000, 20_000)))
    wrong = {
        "it must be a PNG, JPEG or WebP, got SVG": b'<svg xmlns="http://www.w3.org/2000/svg"/>',
        "it must be a PNG, JPEG or WebP, got GIF": animated,
        "it must be one still picture, got 3 frames": moving,
        "its longer side must be at most 200 times the shorter one, got 65500 x 1 pixels": encoded(
            Image.new("RGB", (65_500, 1)), "JPEG"
        ),
        "it must have at most 50000000 pixels, got 20000 x 20000": bomb,
        "it is damaged": encoded(LARGE, "JPEG")[:-200],
        "got something else, or a damaged one": b"hello",
    }
    for fault, data in wrong.items():
        shown = f"data:image/png;base64,{base64.b64encode(data).decode()}"
        status, error = seeing.refused(type="image_url", image_url={"url": shown})
        assert (status, error["param"]) == (400, "messages[0].content[1]"), error
        assert error["message"].startswith("messages[0].content[1]: ") and fault in error["message"], error
    assert seeing.said(part(SMALL), text("x"))[0] > 4


@pytest.mark.parametrize(
    ("image", "fault"),
    [
        ("data:image/png;base64,!!", "the picture must be in base64, and is not"),
        ("data:image/svg+xml,<svg/>", "must be a data: URL in base64, or an https: URL"),
        ("http://example.com/x.png", "must be a data: URL in base64, or an https: URL"),
        ("file:///etc/passwd", "must be a data: URL in base64, or an https: URL"),
        ("https://example.com/x.png", "pictures may be fetched over https from the hosts in image_hosts alone"),
        ("data:;base64," + "A" * (28 << 20), "the picture must have at most 20971520 bytes, got 22020096"),
    ],
)
def test_where_a_picture_is_must_be_allowed(seeing: Seeing, image: str, fault: str) -> None:
    status, error = seeing.refused(type="image_url", image_url={"url": image})
    assert status == 400 and error["param"].startswith("messages[0].content[1]") and fault in error["message"]


def test_more_pictures_than_allowed_are_counted_before_they_are_read(seeing: Seeing) -> None:
    body = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}] * 200}]}
    reply = httpx.post(f"{seeing.server.base_url}/v1/chat/completions", json=body, timeout=100)
    assert reply.status_code == 400
    assert reply.json()["error"]["message"] == (
        "messages[0].content[100]: a request may hold at most 100 pictures, got 200"
    )


def test_a_control_token_in_a_text_is_no_picture(seeing: Seeing) -> None:
    shown = [text("x <image> y"), part(TALL)]
    tokens = httpx.post(
        f"{seeing.server.base_url}/tokenize", json={"messages": [{"role": "user", "content": shown}]}, timeout=100
    ).json()["tokens"]
    num = seeing.processor(text="<image>", images=[TALL])["input_ids"][0].count(702)
    assert tokens.count(702) == num
    assert "x <image> y" in seeing.processor.tokenizer.decode(tokens)


def test_a_tool_may_answer_with_a_picture(seeing: Seeing) -> None:
    """Agents send screenshots so. These templates know no tools: the result is what the user says."""
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    turns = [{"role": "user", "content": "look"}, {"role": "assistant", "content": "I look", "tool_calls": [call]}]
    turns.append({"role": "tool", "tool_call_id": "a", "content": [text("here"), part(TALL)]})
    reply = httpx.post(f"{seeing.server.base_url}/tokenize", json={"messages": turns}, timeout=100).json()
    assert reply["tokens"].count(702) == seeing.processor(text="<image>", images=[TALL])["input_ids"][0].count(702)
    asked = {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"}
    shown = [{"type": "input_image", "image_url": url(TALL), "detail": "high"}]
    items: Any = [{"role": "user", "content": "look"}, asked]
    items.append({"type": "function_call_output", "call_id": "a", "output": shown})
    answer = seeing.openai.responses.create(model="m", input=items, max_output_tokens=2)
    told = {"role": "assistant", "content": [text('{"name": "look", "arguments": {}}')]}
    said = [{"role": "user", "content": [text("look")]}, told, {"role": "user", "content": [SIGN]}]
    assert answer.usage is not None and answer.usage.input_tokens == seeing.wanted(said, [TALL])[0]
    result = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": url(TALL)[22:]}}
    blocks = [{"type": "tool_use", "id": "a", "name": "look", "input": {}}]
    body: Any = {"model": "m", "max_tokens": 2, "messages": [{"role": "assistant", "content": blocks}]}
    answered = {"type": "tool_result", "tool_use_id": "a", "content": [result]}
    body["messages"].append({"role": "user", "content": [answered]})
    reply = httpx.post(f"{seeing.server.base_url}/v1/messages", json=body, timeout=100).json()
    usage = reply["usage"]
    num_tokens = sum(usage[f"{kind}input_tokens"] for kind in ("", "cache_read_", "cache_creation_"))
    assert num_tokens == seeing.wanted([told, {"role": "user", "content": [SIGN]}], [TALL])[0]


def test_without_the_setting_the_text_half_is_served_alone(tmp_path: Path) -> None:
    WRITERS["llava"](tmp_path / "model")
    options = str(tmp_path / "model"), "--dtype", "float32", "--kv-cache-memory", "8MB"
    with serving(tmp_path / "log", *options, WEFT_SERVER_PROCESSES="1", WEFT_PICTURES="false") as server:
        body = {"messages": [{"role": "user", "content": [text("x"), part(SMALL)]}], "max_tokens": 1}
        reply = httpx.post(f"{server.base_url}/v1/chat/completions", json=body, timeout=100)
        assert reply.status_code == 400
        assert "the model does not take parts of type 'image_url'" in reply.json()["error"]["message"]
        modalities = httpx.get(f"{server.base_url}/v1/models").json()["data"][0]["input_modalities"]
    assert modalities == ["text"]
