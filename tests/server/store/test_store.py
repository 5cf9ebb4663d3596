"""The store as routes use it: durable, bounded, one tenant at a time, and whole or not at all."""

import asyncio
import errno
import pathlib
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from weft.server.errors import NotFoundError, StorageError, StorageFullError
from weft.server.settings import Settings
from weft.server.store import store as store_module
from weft.server.store.store import FILE_NAME, Store
from weft.server.store.transaction import Row, Transaction

MakeStore = Callable[..., Store]


@pytest.fixture
def make(tmp_path: pathlib.Path) -> Iterator[MakeStore]:
    made: list[Store] = []

    def make(**settings: Any) -> Store:
        made.append(Store(Settings.model_validate({"data_dir": str(tmp_path / "data"), **settings})))
        return made[-1]

    yield make
    for store in made:
        store.close()


def write(store: Store, work: Callable[[Transaction], Any]) -> Any:
    return asyncio.run(store.write(work))


def read(store: Store, work: Callable[[Transaction], Any]) -> Any:
    return asyncio.run(store.read(work))


def put(store: Store, *rows: Row) -> None:
    write(store, lambda tx: [tx.put(row) for row in rows])


def ids(rows: Any) -> list[str]:
    return [row.id for row in rows]


def all_ids(store: Store, kind: str = "note") -> list[str]:
    return ids(read(store, lambda tx: tx.of_kind(kind)))


def test_another_process_reads_what_was_written(make: MakeStore) -> None:
    put(make(), Row("note", "a", "me", b"{}", created=7, expires=2**40))
    (row,) = read(make(), lambda tx: tx.of_kind("note"))
    assert row == Row("note", "a", "me", b"{}", created=7, expires=2**40, size=2)


def test_a_tenant_finds_only_its_own(make: MakeStore) -> None:
    store = make()
    put(store, Row("note", "a", "me", b"1"), Row("note", "b", "you", b"2"))
    assert read(store, lambda tx: tx.get("note", "a", "you")) is None
    assert write(store, lambda tx: tx.delete("note", "a", "you")) is False
    assert ids(read(store, lambda tx: tx.page("note", "you", limit=9))) == ["b"]
    assert read(store, lambda tx: tx.page("note", "you", after="a", limit=9)) is None
    assert read(store, lambda tx: tx.get("note", "a", None)).data == b"1"


def test_lists_go_both_ways_and_continue(make: MakeStore) -> None:
    store = make()
    put(store, *(Row("note", name, "", b"") for name in "abcd"), Row("part", "p", "", b"", parent="a"))
    put(store, Row("note", "b", "", b"new"))  # keeps its place

    def names(**how: Any) -> list[str]:
        return ids(read(store, lambda tx: tx.page("note", "", **how)))

    assert names(limit=9) == ["d", "c", "b", "a"]
    assert names(limit=2, order="asc", after="a") == ["b", "c"]
    assert names(limit=2, after="c") == ["b", "a"]
    assert ids(read(store, lambda tx: tx.page("part", "", parent="a", limit=9))) == ["p"]


def test_parts_and_events_go_with_their_row(make: MakeStore, tmp_path: pathlib.Path) -> None:
    store, owner = make(), Row("note", "a", "", b"")
    put(store, owner, Row("part", "p", "", b"", parent="a"), Row("part", "q", "", b"", parent="p"))
    write(store, lambda tx: tx.append_events(owner, 0, [b"x", b"y"]))
    write(store, lambda tx: tx.append_events(owner, 2, [b"z"]))
    assert read(store, lambda tx: tx.events("a", after=0, limit=9)) == [(1, b"y"), (2, b"z")]
    put(store, owner)
    assert read(store, lambda tx: tx.get("note", "a", "")).size == 3  # the events count for it
    assert write(store, lambda tx: tx.delete("note", "a", "")) is True
    assert all_ids(store, "part") == []
    with sqlite3.connect(tmp_path / "data" / FILE_NAME) as database:
        assert database.execute("SELECT * FROM totals").fetchall() == [(0, "", 0, 0)]
        assert database.execute("SELECT count(*) FROM events").fetchone() == (0,)
    database.close()


def test_a_part_finds_its_parent_without_a_scan(make: MakeStore) -> None:
    """Each part that was written read the whole table, so that a full store was slow."""
    store, statements = make(), list[str]()
    put(store, Row("note", "a", "", b""))
    connection = store._writer.connection
    assert connection is not None
    connection.set_trace_callback(statements.append)
    put(store, Row("part", "p", "", b"", parent="a"))
    connection.set_trace_callback(None)
    (touching,) = (each for each in statements if each.startswith("UPDATE objects SET used"))
    plan = connection.execute(f"EXPLAIN QUERY PLAN {touching}").fetchall()
    assert plan[0][3].startswith("SEARCH objects")


def test_the_longest_unused_are_evicted(make: MakeStore) -> None:
    store = make(store_max_objects=4)
    put(store, Row("note", "kept", "", b"", is_kept=True))
    for name in "abc":
        put(store, Row("note", name, "", b""))
    put(store, Row("part", "p", "", b"", parent="a"))  # "a" was used last
    put(store, Row("note", "d", "", b""))
    assert all_ids(store) == ["kept", "a", "c", "d"]
    assert all_ids(store, "part") == ["p"]


def test_bytes_bound_the_rows_and_their_events(make: MakeStore) -> None:
    store = make(store_max_bytes=100)
    put(store, Row("note", "a", "", b"x" * 60))
    put(store, Row("note", "b", "", b"x" * 40))
    assert all_ids(store) == ["a", "b"]
    write(store, lambda tx: tx.append_events(Row("note", "b", "", b""), 0, [b"x"]))
    assert all_ids(store) == ["b"]


@pytest.mark.parametrize("bound", [{"store_max_objects": 6}, {"store_max_bytes": 600}])
def test_who_has_most_gives_the_room(make: MakeStore, bound: dict[str, int]) -> None:
    """One tenant that wrote without end evicted everything of the others."""
    store = make(**bound)
    put(store, *(Row("note", name, "quiet", b"x" * 100) for name in "ab"))
    for i in range(9):
        put(store, Row("note", str(i), "loud", b"x" * 100))
    assert all_ids(store) == ["a", "b", "5", "6", "7", "8"]
    put(store, Row("note", "c", "quiet", b"x" * 100))
    assert all_ids(store) == ["a", "b", "6", "7", "8", "c"]


def test_an_earlier_version_becomes_a_new_one(make: MakeStore, tmp_path: pathlib.Path) -> None:
    """Up to version 1, all tenants were counted together."""
    put(make(), Row("note", "a", "me", b"123"), Row("note", "k", "me", b"", is_kept=True))
    write(make(), lambda tx: tx.append_events(Row("note", "k", "me", b""), 0, [b"one"]))
    columns = [("objects", "checksum"), ("objects", "content_checksum"), ("events", "checksum")]
    change_database(
        tmp_path,
        *(f"DROP TRIGGER {name}" for name in ("added", "removed", "changed")),
        *(f"ALTER TABLE {table} DROP COLUMN {column}" for table, column in columns),  # of version 3
        "DROP TABLE totals",
        "CREATE TABLE totals (is_kept, count, size)",
        "PRAGMA user_version = 1",
    )
    put(make(), Row("note", "b", "you", b"45"))
    assert read(make(), lambda tx: tx.get("note", "a", "me")).data == b"123"  # it has no checksum
    assert read(make(), lambda tx: tx.events("k", limit=9)) == [(0, b"one")]
    with sqlite3.connect(tmp_path / "data" / FILE_NAME) as database:
        assert database.execute("SELECT * FROM totals").fetchall() == [
            (0, "me", 1, 3),
            (0, "you", 1, 2),
            (1, "me", 1, 3),
        ]
    database.close()


def test_kept_rows_are_refused_instead(make: MakeStore) -> None:
    store = make(files_max_bytes=100)
    put(store, Row("file", "a", "", b"{}", is_kept=True, size=90))
    with pytest.raises(StorageFullError, match="with 100 bytes; delete some first"):
        put(store, Row("file", "b", "", b"{}", is_kept=True, size=11))
    assert all_ids(store, "file") == ["a"]


def test_one_of_several_tenants_has_a_share(make: MakeStore) -> None:
    """One API key could take all the room for files."""
    store = make(files_max_bytes=100, files_key_share=0.6, api_key="a,b")
    put(store, Row("file", "a", "me", b"{}", is_kept=True, size=60))
    with pytest.raises(StorageFullError, match="12000 files and batches of an API key with 60 bytes"):
        put(store, Row("file", "b", "me", b"{}", is_kept=True, size=1))
    put(store, Row("file", "c", "you", b"{}", is_kept=True, size=40))
    assert asyncio.run(store.has_room("me"))
    asyncio.run(store.write(lambda tx: tx.put(Row("file", "b", "me", b"{}", is_kept=True, size=1)), may_exceed=True))
    assert write(store, lambda tx: tx.delete("file", "c", "you"))
    assert (asyncio.run(store.has_room("me")), asyncio.run(store.has_room("you"))) == (False, True)


def test_events_need_their_row(make: MakeStore) -> None:
    """Events of a row that was deleted meanwhile stayed for ever."""
    store = make()
    with pytest.raises(NotFoundError, match="the note 'a' does not exist"):
        write(store, lambda tx: tx.append_events(Row("note", "a", "", b""), 0, [b"x"]))
    assert read(store, lambda tx: tx.events("a", limit=9)) == []


def test_beyond_the_bounds_rows_may_still_become_fewer(make: MakeStore) -> None:
    store = make(files_max_bytes=100)
    kept = [Row("file", name, "", b"{}", is_kept=True, size=90) for name in "abc"]
    for row in kept:
        asyncio.run(store.write(lambda tx, row=row: tx.put(row), may_exceed=True))
    assert not asyncio.run(store.has_room(""))
    assert write(store, lambda tx: tx.delete("file", "a", "")) is True
    with pytest.raises(StorageFullError):
        put(store, kept[0])
    assert write(store, lambda tx: tx.delete("file", "b", "")) is True
    assert asyncio.run(store.has_room(""))


def test_old_rows_go(make: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store, now = make(store_max_age_s=100), time.time()
    rows = (Row("note", "a", "", b""), Row("note", "b", "", b"", expires=int(now) + 50), Row("note", "c", "", b""))
    put(store, *rows, Row("note", "d", "", b"", is_kept=True))
    monkeypatch.setattr(time, "time", lambda: now + 60)
    assert all_ids(store) == ["a", "c", "d"]  # before anything was written
    put(store, rows[2])
    monkeypatch.setattr(time, "time", lambda: now + 101)
    assert asyncio.run(store.read(lambda tx: tx.get("note", "a", ""))) is None  # before anything was written
    write(store, lambda tx: None)
    assert all_ids(store) == ["c", "d"]


def test_the_disk_is_given_back(make: MakeStore, tmp_path: pathlib.Path) -> None:
    store = make(store_max_bytes=1 << 20)
    for i in range(100):
        put(store, Row("note", str(i), "", b"x" * (100 << 10)))
    assert len(all_ids(store)) == 10
    store.close()
    assert sum(file.stat().st_size for file in (tmp_path / "data").iterdir()) < 2 << 20


def test_a_write_that_fails_leaves_nothing(make: MakeStore) -> None:
    store = make()

    def half(tx: Transaction) -> None:
        tx.put(Row("note", "a", "", b""))
        raise NotFoundError("no such thing")

    with pytest.raises(NotFoundError):
        write(store, half)
    assert all_ids(store) == []


def test_a_full_disk_is_told_and_loses_nothing(make: MakeStore) -> None:
    store = make()
    put(store, Row("note", "a", "", b"safe"))
    assert store._writer.connection is not None
    pages = store._writer.connection.execute("PRAGMA page_count").fetchone()[0]
    store._writer.connection.execute(
        f"PRAGMA max_page_count = {pages + 2}"
    )  # what SQLite then says is what ENOSPC makes it say
    with pytest.raises(StorageFullError) as caught:
        put(store, Row("note", "b", "", b"x" * 100_000))
    assert (caught.value.status, caught.value.code) == (507, "storage_full")
    assert all_ids(store) == ["a"]


def test_removing_takes_no_room_on_the_disk(make: MakeStore, tmp_path: pathlib.Path) -> None:
    """On a full disk nothing could be deleted."""

    def used() -> int:
        return sum(path.stat().st_blocks for path in (tmp_path / "data").iterdir())

    store = make()
    put(store, *(Row("note", str(i), "", b"x" * 100) for i in range(100)))
    before = used()
    for i in range(100):
        assert write(store, lambda tx, i=i: tx.delete("note", str(i), ""))
    assert used() <= before


@pytest.mark.parametrize(
    ("number", "error"), [(errno.ENOSPC, StorageFullError), (errno.EDQUOT, StorageFullError), (errno.EIO, StorageError)]
)
def test_failures_of_files_are_told(make: MakeStore, number: int, error: type[StorageError]) -> None:
    def fail() -> None:
        raise OSError(number, "secret path")

    with pytest.raises(error) as caught:
        asyncio.run(make().run(fail))
    assert type(caught.value) is error
    assert "secret" not in caught.value.message


def test_a_busy_database_is_told(make: MakeStore, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the writes that waited for another process waited its own time: nine took nine times as long."""
    monkeypatch.setattr(store_module, "BUSY_TIMEOUT_S", 0.3)
    store = make()
    put(store, Row("note", "a", "", b""))
    other = sqlite3.connect(tmp_path / "data" / FILE_NAME, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")

    async def write_many() -> list[Any]:
        writes = [store.write(lambda tx, i=i: tx.put(Row("note", str(i), "", b""))) for i in range(9)]
        return await asyncio.gather(*writes, return_exceptions=True)

    began = time.monotonic()
    told = asyncio.run(write_many())
    assert time.monotonic() - began < 1.5
    assert {(type(each), "cannot be used now" in str(each)) for each in told} == {(StorageError, True)}
    assert all_ids(store) == ["a"]
    assert all_ids(make()) == ["a"]  # nor does the first read of a process wait
    other.execute("ROLLBACK")
    other.close()
    put(store, Row("note", "b", "", b""))
    assert all_ids(store) == ["a", "b"]


def test_reads_do_not_wait_for_writes(make: MakeStore) -> None:
    """A read waited for all writes of its process, and these for the disk."""
    store, may_end = make(), threading.Event()
    put(store, Row("note", "a", "", b"old"))

    async def both() -> bytes:
        def slow(tx: Transaction) -> None:
            tx.put(Row("note", "a", "", b"new"))
            assert may_end.wait(30)

        writes = [asyncio.create_task(store.write(slow)) for _ in range(3)]
        await asyncio.sleep(0.05)
        seen = await asyncio.wait_for(store.read(lambda tx: tx.get("note", "a", "")), 10)
        may_end.set()
        await asyncio.gather(*writes)
        assert seen is not None
        after = await store.read(lambda tx: tx.get("note", "a", ""))
        assert after is not None
        return seen.data + after.data

    assert asyncio.run(both()) == b"oldnew"


DAMAGE = ["data = 'forged'", "data = CAST('old' || char(0) AS BLOB)", "tenant = 'you'", "id = 'b'", "checksum = 7",
          "content_checksum = 8", "kind = 'other'"]  # fmt: skip


@pytest.mark.parametrize("change", DAMAGE)
def test_a_damaged_row_is_not_found(make: MakeStore, tmp_path: pathlib.Path, change: str) -> None:
    """Whatever lay in the database was believed, or ended in a traceback."""
    put(make(), Row("note", "a", "me", b"old", content_checksum=1), Row("note", "whole", "me", b"old"))
    change_database(tmp_path, f"UPDATE objects SET {change} WHERE id = 'a'")
    store = make()
    for kind, id in (("note", "a"), ("note", "b"), ("other", "a")):
        assert read(store, lambda tx, kind=kind, id=id: tx.get(kind, id, None)) is None
    assert all_ids(store) == ["whole"]
    assert ids(read(store, lambda tx: tx.page("note", "me", limit=9))) == ["whole"]
    assert read(store, lambda tx: tx.page("note", "you", limit=9)) == []


def test_a_damaged_row_can_be_removed(make: MakeStore, tmp_path: pathlib.Path) -> None:
    put(make(), Row("file", "a", "me", b"old", is_kept=True))
    change_database(tmp_path, "UPDATE objects SET data = 'forged'")
    store = make()
    assert write(store, lambda tx: tx.delete("file", "a", "you")) is False
    assert write(store, lambda tx: tx.delete("file", "a", "me")) is True


@pytest.mark.parametrize("change", ["data = 'x'", "number = number + 7", "owner = 'b'", "checksum = 7"])
def test_a_damaged_event_is_left_out(make: MakeStore, tmp_path: pathlib.Path, change: str) -> None:
    owner = Row("note", "a", "", b"")
    put(make(), owner)
    write(make(), lambda tx: tx.append_events(owner, 0, [b"one", b"two"]))
    change_database(tmp_path, f"UPDATE events SET {change} WHERE number = 1")
    store = make()
    assert read(store, lambda tx: [*tx.events("a", limit=9), *tx.events("b", limit=9)]) == [(0, b"one")]


def change_database(tmp_path: pathlib.Path, *statements: str) -> None:
    with sqlite3.connect(tmp_path / "data" / FILE_NAME) as database:
        for statement in statements:
            database.execute(statement)
    database.close()


def test_a_later_version_is_refused(make: MakeStore, tmp_path: pathlib.Path) -> None:
    put(make(), Row("note", "a", "", b""))
    with sqlite3.connect(tmp_path / "data" / FILE_NAME) as database:
        database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(StorageError):
        read(make(), lambda tx: tx.of_kind("note"))


def test_only_this_user_can_read_it(make: MakeStore, tmp_path: pathlib.Path) -> None:
    put(make(), Row("note", "a", "", b""))
    assert (tmp_path / "data").stat().st_mode & 0o77 == 0
    assert (tmp_path / "data" / FILE_NAME).stat().st_mode & 0o77 == 0


def test_without_a_folder_it_lives_as_long_as_the_store() -> None:
    store = Store(Settings())
    put(store, Row("note", "a", "", b""))
    folder = store.folder
    assert (folder / FILE_NAME).exists()
    store.close()
    del store
    assert not folder.exists()


def test_a_disk_that_hangs_costs_a_bounded_time_and_few_threads(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What hung took the threads of everything else, and the process waited for them at its end."""
    monkeypatch.setattr(store_module, "DISK_S", 0.2)
    monkeypatch.setattr(store_module, "LEAST_BYTES_PER_S", 1e12)
    store, ends = Store(Settings(data_dir=str(tmp_path))), threading.Event()

    async def use() -> list[object]:
        stuck = [store.run(lambda: ends.wait(60)) for _ in range(store_module.MAX_THREADS + 3)]
        long = [store.run(lambda: ends.wait(60), store_module.LONG_BYTES) for _ in range(9)]
        late = await asyncio.gather(*stuck, *long, return_exceptions=True)
        assert {type(each) for each in late} == {StorageError}
        assert "does not answer within 0.2 s" in str(late[0])
        assert await asyncio.to_thread(lambda: 1) == 1, "other threads are free"
        ends.set()
        return await asyncio.gather(store.run(lambda: 2), store.run(lambda: 3, store_module.LONG_BYTES))

    begin = time.monotonic()
    assert asyncio.run(use()) == [2, 3]
    assert time.monotonic() - begin < 10
    store.close()


def test_whoever_is_cancelled_as_the_work_ends_is_cancelled(make: MakeStore) -> None:
    """`asyncio.wait_for` of Python 3.11 gave the result instead, and a batch never ended: nobody cancels twice."""
    store = make()

    async def cancel_after(steps: int) -> None:
        task = asyncio.create_task(store.run(lambda: None))
        await asyncio.sleep(0)
        time.sleep(0.02)  # the thread has done its work, and the event loop does not know
        for _ in range(steps):
            await asyncio.sleep(0)
        if task.cancel():
            with pytest.raises(asyncio.CancelledError):
                await task

    for steps in range(6):
        asyncio.run(cancel_after(steps))
