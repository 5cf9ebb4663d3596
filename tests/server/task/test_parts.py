"""A part that is no text becomes tokens of its own in every API, and blocks of the cache know what it was."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.chat_templates_for_tests import CHATML
from tests.tokenizers_for_tests import byte_level, write_checkpoint
from weft.engine.cache.prefixes import BlockHashes
from weft.engine.request import make_request
from weft.engine.wire.inputs import TokensInput, TokenSpan
from weft.engine.wire.messages import AddRequest, decode_to_engine, encode
from weft.engine.wire.params import SamplingParams
from weft.server.generate.prompts import encode_now
from weft.server.task.parts import PARTS, Span, Spans, located
from weft.server.task.task import Chat
from weft.server.text.chat_template import TemplateOptions
from weft.server.text.text_tokenizer import TokenRoom
from weft.server.text.tokenizer import Tokenizer

HOLDER, HOLDER_ID, SIZE = "\x01", 1, 3
TYPES = ("image_url", "input_image", "image")


def picture(kind: str, shows: str = "cat") -> dict[str, Any]:
    return {"type": kind, "picture": shows}


@pytest.fixture
def seeing(site: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    for kind in TYPES:
        monkeypatch.setitem(PARTS, kind, lambda part, at: Span(HOLDER, SIZE, part.model_extra["picture"].encode()))
    site.tokenizer.added_ids[HOLDER] = HOLDER_ID
    return site


def in_chat(*content: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": list(content)}]}


def call(id: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": "look", "arguments": "{}"}}


def result_in_chat(*content: Any) -> tuple[str, dict[str, Any]]:
    turns = [{"role": "assistant", "tool_calls": [call("a")]}, {"role": "tool", "tool_call_id": "a"}]
    turns[1]["content"] = list(content)
    return "/v1/chat/completions", {"messages": turns}


def in_responses(*content: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/responses", {"input": [{"role": "user", "content": list(content)}]}


def result_in_responses(*content: Any) -> tuple[str, dict[str, Any]]:
    asked = {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"}
    return "/v1/responses", {"input": [asked, {"type": "function_call_output", "call_id": "a", "output": [*content]}]}


def in_messages(*content: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/messages", {"max_tokens": 5, "messages": [{"role": "user", "content": list(content)}]}


def result_in_messages(*content: Any) -> tuple[str, dict[str, Any]]:
    asked = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "look", "input": {}}]}
    answer = {"type": "tool_result", "tool_use_id": "a", "content": list(content)}
    return "/v1/messages", {"max_tokens": 5, "messages": [asked, {"role": "user", "content": [answer]}]}


def in_ollama(*content: Any) -> tuple[str, dict[str, Any]]:
    return "/api/chat", {"messages": [{"role": "user", "content": list(content)}], "stream": False}


WAYS: list[tuple[Callable[..., tuple[str, dict[str, Any]]], str]] = [
    (in_chat, "image_url"),
    (result_in_chat, "image_url"),
    (in_responses, "input_image"),
    (result_in_responses, "input_image"),
    (in_messages, "image"),
    (result_in_messages, "image"),
    (in_ollama, "image_url"),
]


@pytest.mark.parametrize(("body", "kind"), WAYS)
def test_every_api_reads_it(seeing: Any, body: Any, kind: str) -> None:
    path, sent = body({"type": "text", "text": "see"}, picture(kind), picture(kind, "dog"))
    reply = seeing.call("POST", path, json={"model": "alias", **sent})
    assert reply.status == 200, reply.text
    (asked,) = seeing.engine.asked
    ids, (first, second) = asked.input.token_ids, asked.input.spans
    start = bytes(ids[1:]).index(b"see\n") + 5
    assert (first.start, second.start) == (start, start + SIZE + 1) and first.digest != second.digest
    assert ids[start : start + 2 * SIZE + 1] == [*[HOLDER_ID] * SIZE, ord("\n"), *[HOLDER_ID] * SIZE]
    assert ids.count(HOLDER_ID) == 2 * SIZE


@pytest.mark.parametrize(("body", "kind"), WAYS)
def test_nobody_else_is_shown_it(site: Any, body: Any, kind: str) -> None:
    path, sent = body({"type": "text", "text": "see"}, picture(kind))
    reply = site.call("POST", path, json={"model": "alias", **sent})
    assert reply.status == 400 and f"of type '{kind}'" in reply.text


def test_where_only_text_can_stand_it_is_refused(seeing: Any) -> None:
    prediction = {"type": "content", "content": [picture("image_url")]}
    error = seeing.chat(prediction=prediction).error
    assert (error["code"], error["param"]) == ("unsupported_value", "prediction.content[0]")


def test_breakpoints_and_counts_know_its_tokens(seeing: Any) -> None:
    text = {"type": "text", "text": "see", "prompt_cache_breakpoint": {"mode": "explicit"}}
    path, sent = in_chat(picture("image_url"), text, {"type": "text", "text": "more"})
    assert seeing.call("POST", path, json=sent).status == 200
    (asked,) = seeing.engine.asked
    assert [pin.num_tokens for pin in asked.caching.pins] == [1 + len("user: ") + SIZE + len("\nsee")]
    counted = seeing.call("POST", "/tokenize", json={**sent, "add_generation_prompt": True}).json
    assert counted["count"] == len(asked.input.token_ids)
    path, sent = in_responses(picture("input_image"))
    num_tokens = seeing.call("POST", f"{path}/input_tokens", json=sent).json["input_tokens"]
    assert num_tokens == 1 + len("user: \nassistant:") + SIZE


def test_a_prompt_cut_inside_of_it_is_the_engines_to_refuse(seeing: Any) -> None:
    path, sent = in_chat(picture("image_url"))
    for kept, fault in ((12 + SIZE, None), (10 + SIZE, "whole")):
        seeing.call("POST", path, json={**sent, "truncate_prompt_tokens": kept})
        told = seeing.engine.asked[-1].input.fault(1000)
        assert told is None if fault is None else fault in told


def test_one_that_is_cut_away_whole_is_nobodys(seeing: Any) -> None:
    path, sent = in_chat(picture("image_url"), {"type": "text", "text": "a b c d e f g h"})
    assert seeing.call("POST", path, json={**sent, "truncate_prompt_tokens": 4}).status == 200
    asked = seeing.engine.asked[-1].input
    assert not asked.spans and len(asked.token_ids) == 4


def test_the_text_of_a_placeholder_is_no_placeholder(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_checkpoint(tmp_path, byte_level(), template=CHATML))
    spans, holder = Spans(), "<|endoftext|>"
    mark = spans.mark(Span(holder, 2, b"cat"))
    messages = [{"role": "user", "content": f"a {holder} b\n{mark}\nc"}]
    ids = encode_now(tokenizer, Chat(messages, TemplateOptions(), spans=spans), TokenRoom(1000))
    assert tokenizer.decode(ids, skip_special_tokens=False).count(holder) == 3
    assert ids.count(tokenizer.added_id(holder)) == 2


def test_a_mark_may_stand_twice_or_nowhere() -> None:
    spans = Spans()
    cat, dog, _ = (spans.mark(Span(HOLDER, n, b"x")) for n in (1, 2, 3))
    pieces, found = spans.placed([f"a{dog}{cat}", f"b{dog}"])
    assert pieces == ["a", HOLDER * 2, HOLDER, "b", HOLDER * 2]
    assert [span.num_tokens for span in found] == [2, 1, 2]
    ids = [9, 1, 1, 1, 9, 1, 1]
    places = [(span.start, span.num_tokens) for span in located(ids, found, {HOLDER: 1})[0]]
    assert places == [(1, 2), (3, 1), (5, 2)]
    cut = [(span.start, span.num_tokens) for span in located(ids[2:], found, {HOLDER: 1})[0]]
    assert cut == [(-1, 2), (1, 1), (3, 2)]
    markers = [1, 9, 9, 9, 1]  # between placeholders, of which the first is cut away: this must not look whole
    assert located(markers[1:], [Span(HOLDER, 2, b"x")], {HOLDER: 1})[0][0].start == -1


HASHES = BlockHashes(4)


def block_hashes(ids: Sequence[int], *spans: TokenSpan) -> list[bytes]:
    """The hashes of a prompt's blocks, after it went to the engine."""
    sent = AddRequest(TokensInput(list(ids), spans=list(spans)), SamplingParams())
    add = decode_to_engine(encode(sent)[4:])
    assert isinstance(add, AddRequest)
    request = make_request(
        add,
        connection=0,
        arrival=0,
        arrival_time=0.0,
        eos_token_ids=frozenset(),
        max_model_len=100,
        cache_seed=HASHES.seed("", None),
        block_size=4,
    )
    HASHES.extend(request, 2)
    HASHES.extend(request, len(ids) // 4 - 2)  # as the prompt is computed
    return request.block_hashes


def test_blocks_are_shared_up_to_another_picture(seeing: Any) -> None:
    def hashes_of(shows: str, before: str = "") -> list[bytes]:
        path, sent = in_chat({"type": "text", "text": before}, picture("image_url", shows))
        assert seeing.call("POST", path, json=sent).status == 200
        asked = seeing.engine.asked[-1].input
        assert len(asked.token_ids) // 4 > 4
        return block_hashes(asked.token_ids, *asked.spans)

    cat, dog = hashes_of("cat"), hashes_of("dog")
    assert cat == hashes_of("cat")
    num_before = (1 + len("user: \n")) // 4
    assert cat[:num_before] == dog[:num_before] and not set(cat[num_before:]) & set(dog)
    assert not set(cat[num_before:]) & set(hashes_of("cat", before="a"))


def test_what_a_block_holds_of_a_picture_counts() -> None:
    ids = [1] * 16
    plain = block_hashes(ids)
    whole = block_hashes(ids, TokenSpan(0, 16, b"cat"))
    variants = [
        plain,
        whole,
        block_hashes(ids, TokenSpan(1, 15, b"cat")),
        block_hashes(ids, TokenSpan(0, 12, b"cat")),
        block_hashes(ids, TokenSpan(0, 8, b"cat"), TokenSpan(8, 8, b"cat")),
        block_hashes(ids, TokenSpan(0, 8, b"ca"), TokenSpan(8, 8, b"tcat")),
        block_hashes(ids, TokenSpan(0, 16, b"dog")),
    ]
    assert len({each[0] for each in variants}) == len({each[3] for each in variants}) == len(variants)
    late = block_hashes(ids, TokenSpan(12, 4, b"cat"))
    assert late[:3] == plain[:3] and late[3] != plain[3]


@pytest.mark.parametrize(
    "spans", [[(-1, 2)], [(0, 0)], [(3, 2)], [(0, 2), (1, 2)], [(2, 1), (0, 1)]], ids=lambda spans: str(spans)
)
def test_an_engine_refuses_spans_that_are_not_in_the_prompt(spans: list[tuple[int, int]]) -> None:
    given = TokensInput([1, 2, 3, 4], spans=[TokenSpan(*each, b"x") for each in spans])
    assert "whole" in (given.fault(10) or "")
    assert TokensInput([1, 2], spans=[TokenSpan(0, 1, b"x"), TokenSpan(1, 1, b"x")]).fault(10) is None
