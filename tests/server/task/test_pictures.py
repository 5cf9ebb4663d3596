"""Which pictures of a request are read: none beyond what the context has room for, and why that is refused or left."""

import base64
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from weft.engine.wire.pictures import Picture
from weft.server.pictures.calls import Made
from weft.server.pictures.held import ReadPicture
from weft.server.pictures.turns import Turns
from weft.server.task import pictures

SIGN, SIGN_ID = "\x01", 1
ROOM, SIZE = 100, 30
"""Tokens of the context, and of a picture."""


class FakeReader:
    """Each file is a picture of SIZE tokens. `read_files` has those that were read."""

    def __init__(self) -> None:
        self.read_files: list[bytes] = []
        self.files = Turns()

    async def read(self, data: bytes, token_id: int, tenant: str, dtype: str) -> ReadPicture:
        assert self.files._num_left == 0  # it has the turn before it has the file
        self.read_files.append(data)
        made = Made(None, SIGN * SIZE, SIGN, SIZE, data, num_bytes=10)
        return ReadPicture(made, SIGN, Picture(token_id, {}, data))


@pytest.fixture
def seeing(site: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A site with a model that sees, and its reader."""
    site.engine.info = msgspec.structs.replace(site.engine.info, picture_token=SIGN_ID, max_model_len=ROOM)
    site.tokenizer.added_ids[SIGN] = SIGN_ID
    monkeypatch.setattr(site.tokenizer, "is_special", lambda token_id: token_id == SIGN_ID)
    models, reader = site.app.state.context.models, FakeReader()
    for name in models:
        models[name] = replace(models[name], pictures=reader)
    yield SimpleNamespace(site=site, call=site.call, engine=site.engine, read_files=reader.read_files)


def part(name: str, kind: str = "image_url") -> dict[str, Any]:
    url = f"data:;base64,{base64.b64encode(name.encode()).decode()}"
    return {"type": kind, "image_url": {"url": url} if kind == "image_url" else url}


def chat(*names: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [part(name) for name in names]}], "max_tokens": 1, **more}


def turns(*names: str) -> list[dict[str, Any]]:
    """Items of responses: a picture in each turn of the user."""
    return [{"role": "user", "content": [part(name, "input_image")]} for name in names]


def test_reading_stops_where_the_context_is_full(seeing: Any) -> None:
    error = seeing.call("POST", "/v1/chat/completions", json=chat(*"abcdefg")).error
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages[0].content[3]")
    said = "messages[0].content[3]: the context holds at most 100 tokens, the pictures up to here have 120"
    assert error["message"] == said
    assert seeing.read_files == [b"a", b"b", b"c", b"d"]


def test_what_is_counted_or_cut_is_read_whole(seeing: Any) -> None:
    sent = chat(*"abcdefg")
    assert seeing.call("POST", "/tokenize", json={"messages": sent["messages"]}).json["count"] > 7 * SIZE
    sent["truncate_prompt_tokens"] = 50
    assert seeing.call("POST", "/v1/chat/completions", json=sent).status == 200
    items = turns(*"abcdefg")
    counted = seeing.call("POST", "/v1/responses/input_tokens", json={"input": items}).json
    assert counted["input_tokens"] > 7 * SIZE
    source = {"type": "base64", "data": "YQ=="}
    turn = {"role": "user", "content": [{"type": "image", "source": source}] * 7}
    counted = seeing.call("POST", "/v1/messages/count_tokens", json={"model": "alias", "messages": [turn]}).json
    assert counted["input_tokens"] > 7 * SIZE
    assert len(seeing.read_files) == 4 * 7


def test_pictures_of_turns_that_will_be_left_out_are_not_read(seeing: Any) -> None:
    """The shorter form of the conversation is found without them."""
    body = {"input": turns(*"abcdefg"), "truncation": "auto", "max_output_tokens": 1}
    assert seeing.call("POST", "/v1/responses", json=body).status == 200
    assert seeing.read_files == [b"g", b"f", b"e", b"d"]
    assert [picture.data for picture in seeing.engine.asked[0].input.pictures] == [b"f", b"g"]
    body["truncation"] = "disabled"
    assert seeing.call("POST", "/v1/responses", json=body).error["param"] == "input[3].content[0]"


def test_many_turns_with_pictures_are_shortened_too(seeing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "MAX_PICTURES", 2)
    body = {"input": turns(*"abcdefg"), "truncation": "auto", "max_output_tokens": 1}
    assert seeing.call("POST", "/v1/responses", json=body).status == 200
    assert seeing.read_files == [b"g", b"f"]
    del body["truncation"]
    error = seeing.call("POST", "/v1/responses", json=body).error
    assert error["message"] == "input[2].content[0]: a request may hold at most 2 pictures, got 7"


def test_a_question_with_too_many_is_refused_even_so(seeing: Any) -> None:
    question = {"role": "user", "content": [part(name, "input_image") for name in "abcdefg"]}
    body = {"input": [*turns("x"), question], "truncation": "auto", "max_output_tokens": 1}
    error = seeing.call("POST", "/v1/responses", json=body).error
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input[1].content[3]")


def test_bytes_are_bounded_up_to_the_part(seeing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "MAX_REQUEST_BYTES", 15)
    error = seeing.call("POST", "/v1/chat/completions", json=chat(*"abc")).error
    assert error["param"] == "messages[0].content[1]" and "got 20 up to here" in error["message"]
    assert seeing.read_files == [b"a", b"b"]


def test_where_no_picture_can_stand_the_model_is_not_blamed(seeing: Any) -> None:
    prediction = {"type": "content", "content": [part("a")]}
    error = seeing.call("POST", "/v1/chat/completions", json=chat("a", prediction=prediction)).error
    assert error["message"] == "prediction.content[0]: this field does not take parts of type 'image_url'"
    body = {"model": "alias", "input": turns("a"), "questions": [{"type": "predicate", "instructions": "x"}]}
    error = seeing.call("POST", "/v1/decisions", json=body).error
    assert error["message"] == "input[0].content[0]: this API does not take parts of type 'input_image'"
