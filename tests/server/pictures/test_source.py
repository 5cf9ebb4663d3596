"""Where a picture is, in every API's form of a part."""

import pytest

from weft.server.apis.anthropic.schema import Block
from weft.server.apis.ollama.body import OllamaPicture
from weft.server.apis.responses.schema import ResponsePart
from weft.server.errors import ApiError
from weft.server.pictures.calls import MAX_FILE_BYTES
from weft.server.pictures.source import Place, decoded, source_of
from weft.server.task.bodies import ContentPart

URL = "https://pictures.example/x.png"


@pytest.mark.parametrize(
    ("part", "place"),
    [
        (ContentPart(type="image_url", image_url={"url": "data:image/png;base64,QQ=="}), {"data": "QQ=="}),
        (ContentPart(type="image_url", image_url={"url": URL, "detail": "high"}), {"url": URL}),
        (ContentPart(type="image_url", image_url="DATA:;base64,QQ=="), {"data": "QQ=="}),
        (ResponsePart(type="input_image", image_url=URL, detail="auto"), {"url": URL}),
        (ResponsePart(type="input_image", file_id="file-1"), {"file_id": "file-1"}),
        (Block(type="image", source={"type": "base64", "media_type": "image/png", "data": "QQ=="}), {"data": "QQ=="}),
        (Block(type="image", source={"type": "url", "url": URL}), {"url": URL}),
        (Block(type="image", source={"type": "file", "file_id": "file-1"}), {"file_id": "file-1"}),
    ],
)
def test_every_form_is_read(part: object, place: dict[str, str]) -> None:
    assert source_of(part, "at").place() == Place("at", **place)


def test_a_part_may_have_a_path_of_its_own() -> None:
    for data in ("QQ==", "data:image/png;base64,QQ=="):
        part = OllamaPicture(type="image", data=data, place="messages[0].images[1]")
        assert source_of(part, "messages[0].content[1]").place() == Place("messages[0].images[1]", data="QQ==")


@pytest.mark.parametrize(
    ("part", "fault"),
    [
        (ContentPart(type="image_url"), "at must have either image_url or file_id"),
        (
            ContentPart.model_validate({"type": "image", "place": {}, "data": 5, "source": {"type": "url"}}),
            "at must have either image_url or file_id",
        ),
        (ContentPart(type="image_url", image_url=URL, file_id="x"), "at must have either image_url or file_id"),
        (
            ContentPart(type="image_url", image_url={"url": URL, "detail": "low"}),
            "at.detail must be 'auto' or 'high', since the model's processor has one size, got 'low'",
        ),
        (Block(type="image", source={"type": "base64"}), "at.source must be of type base64 with data"),
        (Block(type="image", source={"type": "text", "data": "x"}), "at.source must be of type base64 with data"),
        (Block(type="image"), "at must have either image_url or file_id"),
        (ContentPart(type="image_url", image_url="ftp://x/y"), "at must be a data: URL in base64, or an https: URL"),
        (ContentPart(type="image_url", image_url="data:text/plain,x"), "at must be a data: URL in base64"),
    ],
)
def test_what_says_nothing_is_refused(part: object, fault: str) -> None:
    with pytest.raises(ApiError) as caught:
        source_of(part, "at").place()
    assert caught.value.message.startswith(fault) and (caught.value.param or "").startswith("at")


def test_base64_is_bounded_before_it_is_decoded() -> None:
    assert decoded("QUI=", "at") == b"AB"
    assert len(decoded("A" * (MAX_FILE_BYTES // 3 * 4), "at")) <= MAX_FILE_BYTES
    for data, fault in (("A" * (MAX_FILE_BYTES * 4 // 3 + 8), "at most 20971520 bytes"), ("Q Q", "must be in base64")):
        with pytest.raises(ApiError, match=fault):
            decoded(data, "at")
