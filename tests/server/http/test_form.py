"""The form that brings a file: how many parts it may have, and what they cost."""

import contextlib
import time
from typing import Any

import pytest
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser

from weft.server.errors import ApiError, InvalidRequestError, MalformedBodyError
from weft.server.http.form import MAX_FIELDS, Form


def part(name: str, data: bytes = b"", filename: str = "") -> bytes:
    file = f'; filename="{filename}"' if filename else ""
    return b'--b\r\nContent-Disposition: form-data; name="' + f'{name}"{file}\r\n\r\n'.encode() + data + b"\r\n"


def parsed(body: bytes) -> Form:
    form = Form("file", 1 << 20)
    parser = MultipartParser(b"b", form.callbacks)  # type: ignore[arg-type]
    for start in range(0, len(body), 1 << 16):
        parser.write(body[start : start + (1 << 16)])
    return form


def test_as_many_fields_as_the_bound_and_a_file() -> None:
    form = parsed(
        b"".join(part(f"f{i}", b"%d" % i) for i in range(MAX_FIELDS)) + part("file", b"x", "n") + b"--b--\r\n"
    )
    assert form.is_whole and form.fields == {f"f{i}": str(i) for i in range(MAX_FIELDS)}
    assert (form.filename, form.take(0)) == ("n", b"x")


def test_lists_are_fields_that_come_again() -> None:
    form = parsed(part("a[]", b"1") + part("file", b"x", "n") + part("a[]", b"2") + b"--b--\r\n")
    assert (form.fields, form.lists) == ({}, {"a[]": ["1", "2"]})


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        ([part("a")], InvalidRequestError),
        ([part("file", b"x")], InvalidRequestError),
        ([part("file", b"", "n"), part("a")], InvalidRequestError),
        ([b"--b\r\n\r\n\r\n"], InvalidRequestError),
        ([b"--b\r\nContent-Disposition: form-data" + b"; a=b" * 800 + b"\r\n\r\n\r\n"], InvalidRequestError),
        ([part(f"f{i}") for i in range(99)], MalformedBodyError),
        ([part("file", b"x", "n"), *(part(f"f{i}") for i in range(99))], MalformedBodyError),
        ([part("é" * i) for i in range(1, 99)], MalformedBodyError),
    ],
)
def test_parts_are_counted_whatever_their_names(parts: list[bytes], error: type[ApiError]) -> None:
    """Parts of one name were not: 48 MB of empty ones held the event loop for 10 s."""
    many = b"".join(parts)
    begin = time.process_time()
    with pytest.raises(error) as caught:
        parsed(many * (20_000_000 // len(many)))
    assert time.process_time() - begin < 1
    assert "at most 16 fields" in caught.value.message or "must be sent once" in caught.value.message


@pytest.mark.parametrize("headers", [b"A: b\r\n" * 100, b"A: " + b"x" * 100_000, b"x" * 100_000])
def test_the_headers_of_a_part_are_bounded(headers: bytes) -> None:
    with pytest.raises(ValueError, match=r"[Hh]eader"):
        parsed(b"--b\r\n" + headers)


@pytest.mark.parametrize("piece", [b"\r", b"\n", b"\r\n", b"-", b"\r\n--", b"\r\n--a", b"\0"])
def test_what_looks_like_the_end_of_a_file_costs_no_more_than_the_rest(piece: bytes) -> None:
    data = piece * ((1 << 20) // len(piece))
    begin = time.process_time()
    form = parsed(part("file", data, "n") + b"--b--\r\n")
    assert time.process_time() - begin < 1
    assert form.is_whole and form.take(0) == data


def test_a_field_that_is_sent_twice_is_refused_by_its_name(make_site: Any) -> None:
    body = part("purpose", b"batch") + part("purpose", b"user_data") + part("file", b"x", "n") + b"--b--\r\n"
    headers = {"content-type": "multipart/form-data; boundary=b"}
    reply = make_site().call("POST", "/v1/files", content=body, headers=headers)
    assert (reply.status, reply.error["param"], reply.error["message"]) == (
        *(400, "purpose"),
        "'purpose' must be sent once",
    )


@pytest.mark.parametrize(
    "body",
    [
        b"x" * 1000,
        b"--c\r\n\r\n",
        b"--b\rx",
        b"--b\r\nContent-Disposition x: y\r\n\r\n",
        b"--b\r\nA: b\rc",
        part("a") + b"--b--\r\n" + b"\x1b[31m more" * 1000,
        part("a") + b"--b--junk",
    ],
    ids=["no form", "another boundary", "a cut boundary", "a header", "a line", "data behind it", "no end"],
)
def test_a_form_writes_nothing_into_the_log(body: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """The parser warned of each with what the client had sent; as many lines as there were requests."""
    with contextlib.suppress(FormParserError, ApiError):
        parsed(body)
    assert not caplog.records
