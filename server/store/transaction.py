"""Rows of the store, and what can be done with them inside one transaction.

A row belongs to a tenant, and nobody else finds it. A row whose `parent` is the id of another one is a part of it: it
goes when that one goes. Events are an append-only log that belongs to a row by its id.

Each row and event has a checksum. One that does not fit it is not found, whatever a disk made of it; the log tells it.
"""

import logging
import sqlite3
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from weft.server.errors import NotFoundError, StorageFullError, shown

Order = Literal["asc", "desc"]

_log = logging.getLogger(__name__)

_COLUMNS = "kind, id, tenant, data, parent, created, expires, is_kept, size, content_checksum"
_IS_ALIVE = "(expires IS NULL OR expires > :now) AND (is_kept OR parent <> '' OR used >= :oldest)"


@dataclass(frozen=True, slots=True)
class Row:
    """One stored object.

    Attributes:
        kind: Such as "file" or "response".
        tenant: Whose it is.
        data: JSON.
        parent: The id of the row that this one is a part of; empty: it stands alone.
        created: In seconds since 1970.
        expires: When it is gone, in seconds since 1970; None: no such time.
        is_kept: It is never evicted to make room; instead a row that does not fit is refused.
        size: Bytes that it counts for, here and elsewhere on the disk; 0: those of `data`.
        content_checksum: CRC-32 of what it has elsewhere on the disk; None: nothing, or an earlier Weft wrote it.
    """

    kind: str
    id: str
    tenant: str
    data: bytes
    parent: str = ""
    created: int = 0
    expires: int | None = None
    is_kept: bool = False
    size: int = 0
    content_checksum: int | None = None

    @property
    def checksum(self) -> int:
        """Of what it says and whose it is."""
        return _checksum(self.kind, self.id, self.tenant, self.content_checksum, self.data)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the store may hold: rows that are evicted, and rows that are kept, of which a tenant has a share."""

    max_count: int
    max_bytes: int
    max_age_s: float
    max_kept_count: int
    max_kept_bytes: int
    key_share: float


class Transaction:
    """Reads and writes that succeed or fail together. Valid only inside `Store.read` or `Store.write`."""

    def __init__(self, connection: sqlite3.Connection, bounds: Bounds) -> None:
        self._connection = connection
        self._bounds = bounds
        self._now = time.time()
        self._oldest = self._now - bounds.max_age_s
        self._kept_before = self._totals(is_kept=True)
        self._keepers: set[str] = set()  # tenants that put kept rows

    def put(self, row: Row) -> None:
        """Add a row, or replace the one with its kind and id, which keeps its place in lists and its events."""
        values: list[object] = [row.kind, row.id, row.tenant, row.data, row.parent, row.created or int(self._now)]
        values += [row.expires, row.is_kept, row.size or len(row.data), row.content_checksum, self._now, row.checksum]
        self._connection.execute(
            f"INSERT INTO objects ({_COLUMNS}, used, checksum) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (kind, id) DO UPDATE SET data = excluded.data, expires = excluded.expires, "
            "is_kept = excluded.is_kept, used = excluded.used, checksum = excluded.checksum, "
            "content_checksum = excluded.content_checksum, "
            "size = excluded.size + (SELECT total(length(data)) FROM events WHERE owner = excluded.id)",
            values,
        )
        if row.is_kept:
            self._keepers.add(row.tenant)
        if row.parent:
            self._connection.execute("UPDATE objects SET used = ? WHERE id = ?", (self._now, row.parent))

    def get(self, kind: str, id: str, tenant: str | None) -> Row | None:
        """The row; None if this tenant has none. With tenant None, anybody's."""
        rows = self._rows(f"kind = :kind AND id = :id AND {_IS_ALIVE}", kind=kind, id=id)
        return rows[0] if rows and tenant in (None, rows[0].tenant) else None

    def age(self, kind: str, id: str, tenant: str) -> float | None:
        """Seconds since the row or one of its events was written, without its data; None if this tenant has none."""
        where = f"kind = :kind AND id = :id AND tenant = :tenant AND {_IS_ALIVE}"
        found = self._fetch(f"SELECT :now - used FROM objects WHERE {where}", kind=kind, id=id, tenant=tenant)
        return found[0][0] if found else None

    def page(
        self,
        kind: str,
        tenant: str,
        *,
        parent: str = "",
        member: tuple[str, str] | None = None,
        after: str | None = None,
        limit: int,
        order: Order = "desc",
    ) -> Sequence[Row] | None:
        """Up to `limit` rows in order of creation, from behind the row `after`; None if there is no such row.

        With `member`, only rows whose JSON has this member with this value.
        """
        sign, place = (">", 0) if order == "asc" else ("<", 2**62)
        named = {"kind": kind, "tenant": tenant, "parent": parent}
        where = f"kind = :kind AND tenant = :tenant AND parent = :parent AND {_IS_ALIVE}"
        if after is not None:
            found = self._fetch(f"SELECT number FROM objects WHERE id = :id AND {where}", id=after, **named)
            if not found:
                return None
            place = found[0][0]
        if member is not None:
            where += " AND json_extract(CAST(data AS TEXT), :path) = :value"
            named |= {"path": f"$.{member[0]}", "value": member[1]}
        where += f" AND number {sign} :place ORDER BY number {order} LIMIT :limit"
        return self._rows(where, place=place, limit=limit, **named)

    def of_kind(self, kind: str, *, only_kept: bool = False) -> Sequence[Row]:
        """Every row of a kind, of all tenants, oldest first; for work of the server itself."""
        where = f"kind = :kind AND is_kept >= :only_kept AND {_IS_ALIVE} ORDER BY number"
        return self._rows(where, kind=kind, only_kept=only_kept)

    def ids(self, *kinds: str) -> set[str]:
        """Ids of every row of these kinds, of all tenants."""
        query = f"SELECT id FROM objects WHERE kind = :kind AND {_IS_ALIVE}"
        return {id for kind in kinds for (id,) in self._fetch(query, kind=kind)}

    def delete(self, kind: str, id: str, tenant: str | None) -> bool:
        """Remove a row with its parts and events. False if this tenant has no such row."""
        where = f"kind = :kind AND id = :id AND tenant = coalesce(:tenant, tenant) AND {_IS_ALIVE}"
        return bool(self._fetch(f"DELETE FROM objects WHERE {where} RETURNING 1", kind=kind, id=id, tenant=tenant))

    def append_events(self, owner: Row, first: int, events: Sequence[bytes]) -> None:
        """Append to the log of a row. Events are numbered from `first`.

        Raises:
            NotFoundError: There is no such row, so nothing would ever remove them.
        """
        grown = self._connection.execute(
            "UPDATE objects SET size = size + ?, used = ? WHERE kind = ? AND id = ?",
            (sum(map(len, events)), self._now, owner.kind, owner.id),
        )
        if grown.rowcount != 1:
            raise NotFoundError(f"the {owner.kind} {shown(owner.id)} does not exist")
        numbered = enumerate(events, first)
        self._connection.executemany(
            "INSERT INTO events (owner, number, data, checksum) VALUES (?, ?, ?, ?)",
            [(owner.id, number, event, _checksum(owner.id, number, event)) for number, event in numbered],
        )

    def events(self, owner: str, *, after: int = -1, limit: int, order: Order = "asc") -> Sequence[tuple[int, bytes]]:
        """Up to `limit` events of a row with numbers above `after`, in order."""
        query = "SELECT number, data, checksum FROM events WHERE owner = :owner AND number > :after"
        found = self._fetch(f"{query} ORDER BY number {order} LIMIT :limit", owner=owner, after=after, limit=limit)
        return [
            (number, data)
            for number, data, checksum in found
            if _is_whole(checksum, _checksum(owner, number, data), f"event {number} of {owner}")
        ]

    def tidy(self, *, may_exceed: bool = False) -> None:
        """Remove what is too old, then rows until the bounds hold: of the tenant that has most, the longest unused.

        So a tenant that writes much makes its own rows go, not those of the others.

        Raises:
            StorageFullError: The kept rows have become more, and exceed the bounds.
        """
        bounds = self._bounds
        self._fetch("DELETE FROM objects WHERE expires <= :now")
        self._fetch("DELETE FROM objects WHERE parent = '' AND NOT is_kept AND used < :oldest")
        while _is_beyond(totals := self._totals(is_kept=False), bounds.max_count, bounds.max_bytes):
            measure = "size" if totals[1] > bounds.max_bytes else "count"
            most = f"SELECT tenant FROM totals WHERE NOT is_kept ORDER BY {measure} DESC LIMIT 1"
            query = f"SELECT number FROM objects WHERE tenant = ({most}) AND parent = '' AND NOT is_kept"
            if not self._fetch(f"DELETE FROM objects WHERE number = ({query} ORDER BY used LIMIT 1) RETURNING 1"):
                break
        count, size = self._totals(is_kept=True)
        has_grown = count > self._kept_before[0] or size > self._kept_before[1]
        for tenant in self._keepers if has_grown and not may_exceed else ():
            if (limits := self.exceeded(tenant)) is not None:
                raise StorageFullError(f"there is room for at most {limits}; delete some first")

    def exceeded(self, tenant: str) -> str | None:
        """The bounds of kept rows that all of them, or this tenant's, are beyond; None: neither."""
        bounds = self._bounds
        for whose, share, whom in (("", 1.0, None), (" of an API key", bounds.key_share, tenant)):
            max_count, max_bytes = int(bounds.max_kept_count * share), int(bounds.max_kept_bytes * share)
            if _is_beyond(self._totals(is_kept=True, tenant=whom), max_count, max_bytes):
                return f"{max_count} files and batches{whose} with {max_bytes} bytes"
        return None

    def _totals(self, *, is_kept: bool, tenant: str | None = None) -> tuple[int, int]:
        query = "SELECT coalesce(sum(count), 0), coalesce(sum(size), 0) FROM totals WHERE is_kept = :is_kept"
        ((count, size),) = self._fetch(
            f"{query} AND tenant = coalesce(:tenant, tenant)", is_kept=is_kept, tenant=tenant
        )
        return count, size

    def _rows(self, where: str, **values: Any) -> list[Row]:
        found = self._fetch(f"SELECT checksum, {_COLUMNS} FROM objects WHERE {where}", **values)
        rows = [(checksum, Row(*columns)) for checksum, *columns in found]
        return [row for checksum, row in rows if _is_whole(checksum, row.checksum, f"{row.kind} {row.id}")]

    def _fetch(self, query: str, **values: Any) -> list[Any]:
        return self._connection.execute(query, {"now": self._now, "oldest": self._oldest, **values}).fetchall()


def _is_beyond(totals: tuple[int, int], max_count: int, max_bytes: int) -> bool:
    return totals[0] > max_count or totals[1] > max_bytes


def _checksum(*values: str | bytes | int | None) -> int:
    return zlib.crc32(msgspec.msgpack.encode(values))


def _is_whole(stored: int | None, checksum: int, what: str) -> bool:
    """Whether the stored checksum is this one; rows of an earlier Weft have none."""
    if stored in (None, checksum):
        return True
    _log.error("the store has a damaged object, which is left out: %s", what)
    return False
