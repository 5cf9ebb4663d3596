"""benchmarks/offload: what its table says of rounds, and what it reads of a server."""

import pathlib

import pytest

from benchmarks import offload
from benchmarks.compare import servers
from benchmarks.offload import Round, drop_pages, metric, table


def test_the_ratio_is_the_median_of_rounds_and_one_wrong_answer_shows() -> None:
    rounds = [Round(6.0, 0.5, 1984, True), Round(8.0, 4.0, 1984, True), Round(9.0, 1.0, 1900, False)]
    last = [list(column.cells)[-1] for column in table(rounds).columns]
    assert last == ["median", "8.00 s", "1.00 s", "9.0", "1900", "NO"]


def test_a_metric_that_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    text = b'# TYPE weft:blocks gauge\nweft:blocks{model_name="m"} 7.0\n'
    monkeypatch.setattr(servers, "get", lambda url, path: (200, text))
    assert metric("http://127.0.0.1:1", "weft:blocks") == 7.0
    with pytest.raises(SystemExit, match="no weft:others"):
        metric("http://127.0.0.1:1", "weft:others")


def test_files_are_unchanged_when_their_pages_are_dropped(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.kv").write_bytes(b"x" * 9000)
    drop_pages(tmp_path)
    assert (tmp_path / "a.kv").read_bytes() == b"x" * 9000
    assert offload.parse(["--cold"]).cold
