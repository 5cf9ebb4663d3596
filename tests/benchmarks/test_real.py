"""benchmarks/real: the share of memory's rate, and the table."""

from pathlib import Path

from benchmarks.real import SHARE, WORKLOADS, Figure, shares, table

ONE_STREAM = WORKLOADS[0][0].title
MODEL = "gemma-3-270m-q4_k_m"


def test_a_step_that_reads_the_file_as_fast_as_memory_gives_it_has_a_share_of_100(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(30_000))
    figures = [
        Figure(MODEL, ONE_STREAM, "ms", {"Weft": [1.0, 2.0], "peer": [4.0]}),
        Figure(MODEL, "16 streams", "tok/s", {"Weft": [300.0], "peer": []}),
    ]
    (share,) = shares(figures, {MODEL: path}, 3e7)  # 1 ms
    assert (share.title, share.values) == (SHARE, {"Weft": [100.0, 50.0], "peer": [25.0]})
    cells = [list(column.cells) for column in table([*figures, share], ["Weft", "peer"]).columns]
    assert cells[2:] == [["1.50 ms", "300 tok/s", "75.0 %"], ["4.00 ms", "-", "25.0 %"]]
