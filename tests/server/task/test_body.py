"""What a body may hold, told before work is done on it."""

import contextlib
import json
import threading
from typing import Any

import pytest

from tests.linear_time import assert_linear
from weft.server.errors import InvalidRequestError, MalformedBodyError
from weft.server.http.limits import LIGHT_SIZE
from weft.server.task import body
from weft.server.task.bodies import MAX_MESSAGES, ChatCompletionBody, CompletionBody
from weft.server.task.body import MAX_PARTS, check_amount, decode
from weft.server.task.schema import MAX_ITEMS, MAX_MEMBERS

MESSAGE = {"role": "user", "content": "x"}


def refusal(data: bytes, model: Any = CompletionBody) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as raised:
        decode(model, data)
    return raised.value


@pytest.mark.parametrize(
    "data",
    [
        b"1," * (MAX_ITEMS + 1),
        b"[" * (MAX_PARTS + 1),
        b"{" * (MAX_PARTS + 1),
        b'""' * (MAX_PARTS + 1),
        b'"' + b"a" * 262_142 + b'\\"",' + b"[" * (MAX_PARTS + 1),  # an escape lies across the end of a slice
    ],
)
def test_too_much_is_refused_before_it_is_parsed(data: bytes) -> None:
    with pytest.raises(MalformedBodyError, match="must hold at most"):
        check_amount(data)


@pytest.mark.parametrize("text", ["[{,", '"', "\\", '\\"', 'a\\\\"[', "é\n[,"])
def test_what_is_in_texts_does_not_count(text: str) -> None:
    for shift in range(3):
        check_amount(json.dumps(["x" * shift + text * 2_000_000]).encode())


@pytest.mark.parametrize("filler", [b"1,", b"[],", b'"a",', b'"\\"",', b"\\", b'{"a":', b'"'])
def test_counting_takes_linear_time(filler: bytes) -> None:
    def count(size: int) -> None:
        with contextlib.suppress(MalformedBodyError):
            check_amount(filler * (size // len(filler)))

    assert_linear(count, 4_000_000)


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ('"prompt": "\\ud800"', "prompt"),
        ('"prompt": "\\uD83D \\uDE00"', "prompt"),
        ('"prompt": "x", "more": {"a": [1, {"\\udfff": 2}]}', "more.a[1].?"),
        ('"more": [["\\udc00"], "\\udc01"]', "more[0][0]"),
    ],
)
def test_lone_surrogates_are_refused_in_fields_of_any_name(part: str, param: str) -> None:
    """In the schema of a tool, or in a field that is kept as it is, they were an internal error."""
    error = refusal(b"{" + part.encode() + b"}")
    assert (error.code, error.param) == ("invalid_type", param)
    assert "lone surrogates" in error.message


def test_characters_may_be_written_as_pairs() -> None:
    read = decode(CompletionBody, b'{"prompt": "\\ud83d\\ude00 \xed\x95\x9c \\\\ud800"}')
    assert read is not None
    assert read.prompt == "\U0001f600 \ud55c \\ud800"


def test_finding_them_takes_linear_time() -> None:
    def find(size: int) -> None:
        decode(
            CompletionBody,
            b'{"prompt": "\\ud83d\\ude00", "more": %s%s}' % (b"[" * 400, b"1," * size + b"1" + b"]" * 400),
        )

    assert_linear(find, 200_000)


def test_the_first_wrong_item_is_told_and_no_other() -> None:
    """Each item was a finding: 1.2 MB of empty texts took 603 MB and 2.7 seconds."""
    error = refusal(b'{"prompt": [1' + b', ""' * 100_000 + b"]}")
    assert (error.param, error.message) == ("prompt[1]", "prompt[1]: input should be a valid integer, got ''")
    wrong = {"messages": [MESSAGE, {"role": "x"}, {"role": "y"}]}
    assert refusal(json.dumps(wrong).encode(), ChatCompletionBody).param == "messages[1].role"


def test_lists_and_objects_have_bounds() -> None:
    error = refusal(json.dumps({"messages": [MESSAGE] * (MAX_MESSAGES + 1)}).encode(), ChatCompletionBody)
    assert f"at most {MAX_MESSAGES} items" in error.message
    error = refusal(json.dumps({"logit_bias": {str(i): "x" for i in range(MAX_MEMBERS + 1)}}).encode())
    assert error.message.startswith(f"logit_bias: input should have at most {MAX_MEMBERS} members")
    assert len(error.message) < 250


def test_numbers_that_json_lacks_are_refused() -> None:
    for text, value in (("NaN", "nan"), ("[1, {}, -Infinity]", "-inf"), ("1e999", "inf")):
        error = refusal(f'{{"prompt": "NaN", "tools": [{{"x": {text}}}]}}'.encode())
        assert (error.message, error.param) == (f"tools must hold numbers as JSON has them, got {value}", "tools")
    assert decode(CompletionBody, b'{"prompt": "NaN, Infinity"}') is not None


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b'{"prompt": nul}', "Expecting value at character 11"),
        (b'{"prompt": "\xff"}', "it is not encoded in UTF-8"),
        ('{"prompt": "\\\\"}'.encode("utf-16"), "it is not encoded in UTF-8"),
        ('{"prompt": "\\\\"}'.encode("utf-16-le"), "Expecting property name"),
        (b'{"prompt": ' + b"[" * 100_000, "it is nested too deeply"),
        (b'{"prompt": 1' + b"1" * 5000 + b"}", "a number in it has too many digits"),
    ],
)
@pytest.mark.parametrize("padding", [0, LIGHT_SIZE])
def test_a_body_that_is_no_json_says_why(site: Any, data: bytes, fault: str, padding: int) -> None:
    reply = site.call(
        "POST",
        "/v1/completions",
        content=b" " * padding + data,
        headers={"content-type": "application/json"},
    )
    assert reply.status == 400
    assert reply.error["message"].startswith(f"the body is not valid JSON: {fault.partition(' at ')[0]}")


def test_a_long_body_is_decoded_beside_the_event_loop(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """100,000 messages held up the streams of others for 2.5 seconds."""
    threads: list[str] = []

    def noting(model: Any, data: bytes) -> Any:
        threads.append(threading.current_thread().name)
        return decode(model, data)

    monkeypatch.setattr(body, "decode", noting)
    assert site.chat(messages=[{"role": "user", "content": ""}] * 20).status == 200
    assert site.complete(prompt=[1] * LIGHT_SIZE).error["code"] == "context_length_exceeded"
    assert threads == ["MainThread", threads[1]]
    assert threads[1] != "MainThread"


@pytest.mark.parametrize(
    "content_type", [None, "application/x-www-form-urlencoded", "text/plain; charset=utf-8", "", "x"]
)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/chat", {"messages": [{"role": "user", "content": "Hi"}], "stream": False}),
        ("/api/generate", {"prompt": "Hi", "stream": False}),
        ("/api/show", {"model": "alias"}),
        ("/completion", {"prompt": "Hi"}),
    ],
)
def test_ollamas_and_llama_cpps_routes_read_any_content_type(
    make_site: Any, path: str, body: dict[str, Any], content_type: str | None
) -> None:
    """LiteLLM, and curl as Ollama documents it, were refused. A web page is not: it may send these types unasked."""
    headers = {} if content_type is None else {"content-type": content_type}
    content = json.dumps(body).encode()
    site = make_site(host="0.0.0.0")  # where the origin itself is not refused
    assert site.call("POST", path, content=content, headers=headers).status == 200
    for origin in ("https://evil.example", "null", ""):
        reply = site.call("POST", path, content=content, headers={**headers, "origin": origin})
        assert reply.status == 400 and "application/json" in reply.text
    assert len(site.engine.asked) == (path != "/api/show")
    as_json = {"content-type": "application/json", "origin": "https://evil.example"}
    assert make_site().call("POST", path, content=content, headers=as_json).status == 403
    assert site.call("POST", path, content=b"a=1&b=2", headers=headers).status == 400
