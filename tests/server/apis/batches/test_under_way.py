"""Bounds on bytes and files hold for what is under way: uploads that arrive, parts that become a file."""

import asyncio
import pathlib
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from weft.server.store import contents
from weft.server.store import store as store_module
from weft.server.store.transaction import Row

MB = 1 << 20


def on_disk(folder: pathlib.Path) -> int:
    return sum(path.stat().st_size for path in (folder / contents.FILES).iterdir())


@pytest.mark.parametrize("is_declared", [True, False])
@pytest.mark.parametrize("ends", ["whole", "cut"])
def test_files_that_arrive_at_once_take_no_more_room_than_there_is(
    make_site: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, ends: str, is_declared: bool
) -> None:
    """Each was held against what was stored: as many as there are connections could fill the disk."""
    monkeypatch.setattr(contents, "ROOM_BYTES", 2 * MB)
    site = make_site(data_dir=str(tmp_path), max_file_bytes=6 * MB, files_max_bytes=16 * MB)
    store, begun, most = site.app.state.context.store, 0, 0

    async def send(client: httpx.AsyncClient, go: asyncio.Event) -> int:
        head = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        head += b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
        end = b"\r\n--b--\r\n" if ends == "whole" else b""

        async def body() -> AsyncIterator[bytes]:
            nonlocal begun
            yield head
            for number in range(5):
                yield b"x" * MB
                if number == 3:
                    begun += 1
                    await go.wait()
            yield end

        headers = {"content-type": "multipart/form-data; boundary=b"}
        if is_declared:
            headers["content-length"] = str(len(head) + 5 * MB + len(end))
        return (await client.post("/v1/files", content=body(), headers=headers)).status_code

    async def run() -> list[int]:
        nonlocal most
        go = asyncio.Event()
        transport = httpx.ASGITransport(site.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            sending = [asyncio.create_task(send(client, go)) for _ in range(9)]
            deadline = time.monotonic() + 30
            while begun + sum(task.done() for task in sending) < 9:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)
            most = on_disk(tmp_path)
            go.set()
            return await asyncio.gather(*sending)

    statuses = asyncio.run(run())
    assert most <= 16 * MB
    if ends == "whole":
        assert is_declared <= statuses.count(200) <= 3 and set(statuses) <= {200, 507}
        assert on_disk(tmp_path) == 5 * MB * statuses.count(200)
    else:
        assert set(statuses) <= {400, 507} and on_disk(tmp_path) == 0
    assert asyncio.run(store.read(lambda transaction: transaction.of_kind(contents.ARRIVAL))) == []
    store.close()


def test_room_of_a_process_that_died_is_free_again(make_site: Any, tmp_path: pathlib.Path) -> None:
    site = make_site(data_dir=str(tmp_path), max_file_bytes=100, files_max_bytes=100)
    store, died = site.app.state.context.store, int(time.time()) - 1
    row = Row(contents.ARRIVAL, "file-x", "", b"{}", expires=died, is_kept=True, size=100)
    asyncio.run(store.write(lambda transaction: transaction.put(row), may_exceed=True))
    reply = site.call("POST", "/v1/files", data={"purpose": "batch"}, files={"file": ("n", b"x" * 50)})
    assert reply.status == 200, reply.text
    store.close()


def test_a_part_is_never_longer_than_its_upload(make_site: Any, tmp_path: pathlib.Path) -> None:
    """It was written whole, and refused then."""
    site = make_site(data_dir=str(tmp_path))
    body = {"bytes": 10, "filename": "f", "mime_type": "", "purpose": "batch"}
    upload = site.call("POST", "/v1/uploads", json=body).json["id"]
    reply = site.call("POST", f"/v1/uploads/{upload}/parts", files={"data": ("n", b"x" * 11)})
    assert (reply.status, "at most 10 bytes" in reply.text) == (413, True)
    assert on_disk(tmp_path) == 0
    site.app.state.context.store.close()


def test_few_copies_of_an_upload_are_under_way_however_often_it_is_completed(
    make_site: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = make_site(data_dir=str(tmp_path))
    body = {"bytes": 3, "filename": "f", "mime_type": "", "purpose": "batch"}
    upload = site.call("POST", "/v1/uploads", json=body).json["id"]
    part = site.call("POST", f"/v1/uploads/{upload}/parts", files={"data": ("n", b"one")}).json["id"]
    monkeypatch.setattr(store_module, "LONG_BYTES", 1)
    join, lock, num, most = contents.join, threading.Lock(), 0, 0

    def counted(*args: Any) -> None:
        nonlocal num, most
        with lock:
            num += 1
            most = max(most, num)
        time.sleep(0.02)
        try:
            join(*args)
        finally:
            with lock:
                num -= 1

    monkeypatch.setattr(contents, "join", counted)

    async def run() -> list[int]:
        transport = httpx.ASGITransport(site.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            path = f"/v1/uploads/{upload}/complete"
            replies = [client.post(path, json={"part_ids": [part]}) for _ in range(9)]
            return [reply.status_code for reply in await asyncio.gather(*replies)]

    statuses = asyncio.run(run())
    assert (statuses.count(200), set(statuses) - {200, 400}) == (1, set())
    assert most <= store_module.MAX_LONG_THREADS
    assert on_disk(tmp_path) == 3
    site.app.state.context.store.close()
