"""/v1/files and /v1/uploads with the OpenAI SDK, and what they refuse."""

import asyncio
import errno
import hashlib
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.linear_time import assert_linear
from weft.server.apis.batches import file_routes
from weft.server.store import contents as stored
from weft.server.store.transaction import Row, Transaction

TEXT = b"one\ntwo\r\n--three\n" * 1000


@pytest.fixture
def data(make_site: Any, tmp_path: pathlib.Path) -> Iterator[Any]:
    site = make_site(data_dir=str(tmp_path), max_file_bytes=100_000, files_max_bytes=300_000, api_key=("a", "b"))
    yield site
    site.app.state.context.store.close()


@pytest.fixture
def client(data: Any) -> Iterator[openai.OpenAI]:
    with data.live() as url, openai.OpenAI(base_url=f"{url}/v1", api_key="a", max_retries=0) as client:
        yield client


def post(site: Any, *, file: bytes | None = b"x", headers: Any = None, **fields: str) -> Any:
    files = {} if file is None else {"file": ("name", file)}
    return site.call(
        "POST", "/v1/files", data={"purpose": "batch", **fields}, files=files or {"other": (None, b"")},
        headers=headers or {"authorization": "Bearer a"},
    )  # fmt: skip


def contents(tmp_path: pathlib.Path) -> list[str]:
    return [path.name for path in (tmp_path / stored.FILES).iterdir()]


def test_a_file_comes_back(client: openai.OpenAI, tmp_path: pathlib.Path) -> None:
    file = client.files.create(file=("lines.jsonl", TEXT), purpose="batch")
    assert (file.bytes, file.filename, file.purpose, file.status) == (len(TEXT), "lines.jsonl", "batch", "processed")
    assert file.expires_at == pytest.approx(file.created_at + 30 * 86400, abs=2)
    other = client.files.create(
        file=("ünï.txt", b""), purpose="user_data", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert other.filename == "ünï.txt"
    assert other.expires_at == pytest.approx(other.created_at + 3600, abs=2)
    assert client.files.content(file.id).content == TEXT
    assert client.files.content(other.id).content == b""
    assert client.files.retrieve(file.id) == file
    assert [found.id for found in client.files.list(limit=1)] == [other.id, file.id]  # the SDK turns the pages
    assert [found.id for found in client.files.list(order="asc")] == [file.id, other.id]
    assert [found.id for found in client.files.list(purpose="batch")] == [file.id]
    stranger = client.with_options(api_key="b")
    assert list(stranger.files.list()) == []
    for act in (stranger.files.retrieve, stranger.files.content, stranger.files.delete):
        with pytest.raises(openai.NotFoundError):
            act(file.id)
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError, match="no such file"):
        client.files.content(file.id)
    assert contents(tmp_path) == [other.id]


def test_an_upload_in_parts(client: openai.OpenAI, tmp_path: pathlib.Path) -> None:
    upload = client.uploads.create(bytes=len(TEXT), filename="f", mime_type="text/plain", purpose="user_data")
    assert upload.status == "pending"
    second = client.uploads.parts.create(upload.id, data=TEXT[7000:])
    first = client.uploads.parts.create(upload.id, data=TEXT[:7000])
    with pytest.raises(openai.BadRequestError, match="md5 must be that of the file"):
        client.uploads.complete(upload.id, part_ids=[first.id, second.id], md5="0" * 32)
    with pytest.raises(openai.BadRequestError, match="must have 17000 bytes together, got 7000"):
        client.uploads.complete(upload.id, part_ids=[first.id])
    with pytest.raises(openai.BadRequestError, match="each once"):
        client.uploads.complete(upload.id, part_ids=[first.id, first.id])
    with pytest.raises(openai.BadRequestError, match="at most 17000 bytes in 10000 parts, got 17001"):
        client.uploads.parts.create(upload.id, data=b"x")
    with pytest.raises(openai.NotFoundError):
        client.with_options(api_key="b").uploads.cancel(upload.id)
    md5 = hashlib.md5(TEXT).hexdigest()
    done = client.uploads.complete(upload.id, part_ids=[first.id, second.id], md5=md5)
    assert done.status == "completed" and done.file is not None
    assert client.files.content(done.file.id).content == TEXT
    assert contents(tmp_path) == [done.file.id]
    with pytest.raises(openai.BadRequestError, match="must be pending, it is completed"):
        client.uploads.cancel(upload.id)
    other = client.uploads.create(bytes=1, filename="f", mime_type="text/plain", purpose="batch")
    client.uploads.parts.create(other.id, data=b"x")
    assert client.uploads.cancel(other.id).status == "cancelled"
    assert contents(tmp_path) == [done.file.id]


def test_of_two_that_complete_an_upload_one_is_told(
    client: openai.OpenAI, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was told 503: the other's parts were gone."""
    upload = client.uploads.create(bytes=3, filename="f", mime_type="text/plain", purpose="user_data")
    part = client.uploads.parts.create(upload.id, data=b"one").id
    done = []

    def join_late(*args: Any) -> None:
        monkeypatch.undo()
        done.append(client.uploads.complete(upload.id, part_ids=[part]))
        stored.join(*args)

    monkeypatch.setattr(stored, "join", join_late)
    with pytest.raises(openai.BadRequestError, match="must be pending, it is completed"):
        client.uploads.complete(upload.id, part_ids=[part])
    assert contents(tmp_path) == [done[0].file.id]


def test_parts_are_checked_in_linear_time() -> None:
    def check(num_parts: int) -> None:
        parts = {f"part_{i:024}": Row("part", "", "", b"", size=2) for i in range(num_parts)}
        file_routes._check_parts([*parts], parts, num_parts)

    assert_linear(check, file_routes.MAX_PARTS)


@pytest.mark.parametrize("size", [True, 3.0, "3"])
def test_the_bytes_of_an_upload_are_a_whole_number(data: Any, size: Any) -> None:
    body = {"bytes": size, "filename": "f", "mime_type": "", "purpose": "batch"}
    reply = data.call("POST", "/v1/uploads", json=body, headers={"authorization": "Bearer a"})
    assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "invalid_type", "bytes")


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"purpose": "evals"}, "purpose", "purpose must be batch or user_data or vision, got 'evals'"),
        ({"expires_after[seconds]": "4000"}, "expires_after.anchor", "must be created_at, got None"),
        (
            {"expires_after[anchor]": "created_at", "expires_after[seconds]": "1"},
            "expires_after.seconds",
            "must be between 3600 and 2592000, got 1",
        ),
        (
            {"expires_after[anchor]": "created_at", "expires_after[seconds]": "soon"},
            "expires_after.seconds",
            "must be a whole number, got 'soon'",
        ),
        ({"purpose": "x" * 70000}, "purpose", "must have at most 65536 bytes"),
    ],
)
def test_a_wrong_field_stores_nothing(
    data: Any, tmp_path: pathlib.Path, fields: dict[str, str], param: str, message: str
) -> None:
    reply = post(data, **fields)
    assert (reply.status, reply.error["param"]) == (400, param)
    assert message in reply.error["message"]
    assert contents(tmp_path) == []


def test_forms_that_are_none(data: Any, tmp_path: pathlib.Path) -> None:
    key = {"authorization": "Bearer a"}
    assert post(data, file=None).error["message"] == "file is required"
    assert data.call("POST", "/v1/files", json={}, headers=key).status == 400
    form = {**key, "content-type": "multipart/form-data; boundary=b"}
    for body in (b"nonsense", b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\nhalf'):
        assert data.call("POST", "/v1/files", content=body, headers=form).status == 400
    assert contents(tmp_path) == []


@pytest.mark.parametrize(
    ("query", "param"), [("limit=0", "limit"), ("limit=x", "limit"), ("order=up", "order"), ("after=nobody", "after")]
)
def test_a_wrong_query_is_refused(data: Any, query: str, param: str) -> None:
    reply = data.call("GET", f"/v1/files?{query}", headers={"authorization": "Bearer a"})
    assert (reply.status, reply.error["param"]) == (400, param)


def test_bounds_of_one_file_and_of_all(data: Any, tmp_path: pathlib.Path) -> None:
    assert post(data, file=b"x" * 100_001).status == 413
    assert post(data, file=b"x" * 200_000).status == 413  # refused by its declared length
    assert post(data, file=b"x" * 100_000).status == 200
    reply = post(data, file=b"x" * 60_000)
    assert (reply.status, reply.error["code"]) == (507, "storage_full")
    assert "files and batches of an API key with 150000 bytes" in reply.error["message"]
    assert len(contents(tmp_path)) == 1
    assert post(data, file=b"x" * 40_000).status == 200
    assert post(data, file=b"x" * 100_000, headers={"authorization": "Bearer b"}).status == 200  # has its own share


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("place", "step"),
    [(stored.Content, "__init__"), (stored.Content, "write"), (stored.Content, "finish"), (Transaction, "put")],
)
def test_a_full_disk_stores_nothing(
    data: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, place: type, step: str
) -> None:
    kept = post(data, file=b"kept").json["id"]
    with monkeypatch.context() as patch:
        patch.setattr(place, step, full)
        reply = post(data)
    assert (reply.status, reply.error["code"]) == (507, "storage_full")
    assert contents(tmp_path) == [kept]
    assert data.call("GET", f"/v1/files/{kept}/content", headers={"authorization": "Bearer a"}).text == "kept"


def test_a_full_disk_is_freed(data: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deleting a file was a 507."""
    path, delete = f"/v1/files/{post(data).json['id']}", Transaction.delete
    key = {"authorization": "Bearer a"}
    with monkeypatch.context() as patch:
        patch.setattr(Transaction, "delete", lambda *row: full() if contents(tmp_path) else delete(*row))
        assert data.call("DELETE", path, headers=key).json["deleted"] is True
    assert data.call("GET", path, headers=key).status == 404


def test_a_file_without_its_content_is_not_found(data: Any, tmp_path: pathlib.Path) -> None:
    """It was a 500."""
    id, key = post(data).json["id"], {"authorization": "Bearer a"}
    (tmp_path / stored.FILES / id).unlink()
    reply = data.call("GET", f"/v1/files/{id}/content", headers=key)
    assert (reply.status, reply.error["code"]) == (404, "not_found")
    assert data.call("DELETE", f"/v1/files/{id}", headers=key).json["deleted"] is True


def test_a_full_disk_leaves_an_upload_as_it_was(
    client: openai.OpenAI, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = client.uploads.create(bytes=6, filename="f", mime_type="text/plain", purpose="user_data")
    parts = [client.uploads.parts.create(upload.id, data=b"one").id]
    with monkeypatch.context() as patch:
        patch.setattr(stored.Content, "write", full)
        with pytest.raises(openai.InternalServerError, match="disk of the server's data folder is full") as caught:
            client.uploads.parts.create(upload.id, data=b"two")
        assert caught.value.status_code == 507
    parts.append(client.uploads.parts.create(upload.id, data=b"two").id)
    with monkeypatch.context() as patch:
        patch.setattr(stored.Content, "finish", full)
        with pytest.raises(openai.InternalServerError, match="full"):
            client.uploads.complete(upload.id, part_ids=parts)
    assert sorted(contents(tmp_path)) == sorted(parts)
    done = client.uploads.complete(upload.id, part_ids=parts)
    assert done.file is not None and client.files.content(done.file.id).content == b"onetwo"


def test_what_is_stored_is_acknowledged_though_tidying_fails(data: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer was 503 "nothing was stored", and the file was there."""
    kept = post(data, file=b"kept")
    monkeypatch.setattr(pathlib.Path, "unlink", full)
    path = f"/v1/files/{kept.json['id']}"
    assert data.call("DELETE", path, headers={"authorization": "Bearer a"}).json["deleted"] is True


@pytest.mark.parametrize(("is_late", "status"), [(False, 404), (True, 200)])
def test_a_file_that_is_deleted_while_it_is_read_is_whole_or_gone(
    data: Any, monkeypatch: pytest.MonkeyPatch, is_late: bool, status: int
) -> None:
    """It was a 500, or a 200 whose body ended early."""
    id, key = post(data, file=TEXT).json["id"], {"authorization": "Bearer a"}

    open_content = stored.open_content

    def opened(store: Any, row: Row) -> Any:
        file = open_content(store, row) if is_late else None
        stored.content_path(store, id).unlink()
        return file or open_content(store, row)

    monkeypatch.setattr(stored, "open_content", opened)
    reply = data.call("GET", f"/v1/files/{id}/content", headers=key)
    assert (reply.status, reply.text == TEXT.decode()) == (status, is_late)


def test_of_two_deletions_at_once_one_finds_nothing(data: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    id, key = post(data, file=TEXT).json["id"], {"authorization": "Bearer a"}
    find = file_routes.find_file

    async def found(*args: Any) -> Row:
        row = await find(*args)
        await args[2].store.write(lambda transaction: transaction.delete("file", row.id, row.tenant))  # the other one
        return row

    monkeypatch.setattr(file_routes, "find_file", found)
    assert data.call("DELETE", f"/v1/files/{id}", headers=key).status == 404


def test_a_stream_of_a_deleted_file_goes_on(client: openai.OpenAI, tmp_path: pathlib.Path) -> None:
    file = client.files.create(file=("f", TEXT), purpose="user_data")
    with client.files.with_streaming_response.content(file.id) as reply:
        pieces = reply.iter_bytes(100)
        got = next(pieces)
        client.files.delete(file.id)
        assert got + b"".join(pieces) == TEXT
    assert contents(tmp_path) == []


def test_a_part_of_a_file_comes_alone(data: Any) -> None:
    id = post(data, file=TEXT).json["id"]
    key = {"authorization": "Bearer a", "range": "bytes=4-8"}
    reply = data.call("GET", f"/v1/files/{id}/content", headers=key)
    assert (reply.status, reply.text.encode()) == (206, TEXT[4:9])


@pytest.mark.parametrize("damaged", [b"", TEXT[:-1], TEXT + b"x", TEXT[:5] + b"X" + TEXT[6:]])
def test_what_was_not_written_is_not_read(data: Any, tmp_path: pathlib.Path, damaged: bytes) -> None:
    """Whatever lay there was sent as the file."""
    id, key = post(data, file=TEXT).json["id"], {"authorization": "Bearer a"}
    (tmp_path / stored.FILES / id).write_bytes(damaged)
    reply = data.call("GET", f"/v1/files/{id}/content", headers=key)
    assert (reply.status, "is damaged on the server's disk" in reply.error["message"]) == (503, True)
    assert data.call("DELETE", f"/v1/files/{id}", headers=key).json["deleted"] is True


def test_a_damaged_part_makes_no_file(client: openai.OpenAI, tmp_path: pathlib.Path) -> None:
    upload = client.uploads.create(bytes=3, filename="f", mime_type="text/plain", purpose="user_data")
    part = client.uploads.parts.create(upload.id, data=b"one").id
    (tmp_path / stored.FILES / part).write_bytes(b"two")
    with pytest.raises(openai.InternalServerError, match="is damaged"):
        client.uploads.complete(upload.id, part_ids=[part])
    assert contents(tmp_path) == [part]


def test_content_without_a_row_is_swept(data: Any, tmp_path: pathlib.Path) -> None:
    kept, store = post(data).json["id"], data.app.state.context.store
    for name in ("file-left", "part_left", "file-new"):
        (tmp_path / stored.FILES / name).touch()
    for name in ("file-left", "part_left", kept):
        os.utime(tmp_path / stored.FILES / name, (1, 1))
    asyncio.run(stored.sweep(store))
    assert sorted(contents(tmp_path)) == sorted([kept, "file-new"])


def test_two_sweeps_do_not_mind_each_other(
    data: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What another removed was told as a failure of the store, and the rest stayed."""
    kept, store = post(data).json["id"], data.app.state.context.store
    left = [tmp_path / stored.FILES / f"file-{i}" for i in range(9)]
    for path in left:
        path.touch()
        os.utime(path, (1, 1))
    gone, stat, unlink = iter(left[::2]), pathlib.Path.stat, pathlib.Path.unlink

    def stat_late(path: pathlib.Path, **how: Any) -> os.stat_result:
        if (other := next(gone, None)) is not None:
            other.unlink(missing_ok=True)
        return stat(path, **how)

    def unlink_late(path: pathlib.Path, **how: Any) -> None:
        unlink(left[3], missing_ok=True)
        unlink(path, **how)

    monkeypatch.setattr(pathlib.Path, "stat", stat_late)
    monkeypatch.setattr(pathlib.Path, "unlink", unlink_late)
    asyncio.run(stored.sweep(store))
    monkeypatch.undo()
    assert contents(tmp_path) == [kept]
    assert "failed" not in caplog.text


def test_an_upload_costs_the_same_in_a_full_store(data: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It read the rows of all files."""
    store = data.app.state.context.store
    post(data)
    asyncio.run(
        store.write(
            lambda tx: [tx.put(Row("file", f"file-{i}", "a", b"{}", is_kept=True, size=1)) for i in range(1000)]
        )
    )
    statements: list[str] = []
    for line in (store._reader, store._writer):
        if line.connection is not None:
            line.connection.set_trace_callback(statements.append)
    assert post(data).status == 200
    plans = [
        step[3]
        for each in statements
        if each.lstrip().upper().startswith(("SELECT", "DELETE", "UPDATE"))
        for step in store._writer.connection.execute(f"EXPLAIN QUERY PLAN {each}")
    ]
    assert plans and not [step for step in plans if step.startswith("SCAN") and "totals" not in step]
