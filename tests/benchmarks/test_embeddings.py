"""benchmarks/embeddings: texts, CPU time of a tree of processes, and a short run of both sides."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import embeddings
from benchmarks.embeddings import Figures, Reference, Turn, cpu_s, make_texts, table, words

SHAPE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 3000,
}


def test_words_differ() -> None:
    assert len(set(words(30_517))) == 30_517


def test_texts_have_as_many_words_as_leave_room_for_two_tokens() -> None:
    texts = make_texts(3, 16, 3000)
    assert [len(text.split()) for text in texts] == [14, 14, 14]
    assert texts == make_texts(3, 16, 3000)


def test_cpu_time_counts_children() -> None:
    work = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'sum(range(10**7)); input()'])"
    with subprocess.Popen([sys.executable, "-c", work], stdin=subprocess.PIPE) as process:
        while cpu_s(process.pid) < 0.1:
            assert process.poll() is None
        process.communicate(b"\n")


def test_ratios_are_of_medians() -> None:
    turns = [Turn(Reference.name, wall, 2 * wall) for wall in (30.0, 20.0, 90.0)]
    turns += [Turn("Weft", wall, wall) for wall in (20.0, 1.0, 99.0)]
    columns = table([Figures("float32", 60, 32, 10.0, 1e-6, tuple(turns))]).columns
    assert [list(column.cells)[:3] for column in columns[2:]] == [
        ["2.00", "3.00", "6.00"],
        ["1.00", "1.50", ""],
        ["1000", "333", ""],
        ["1.00", "3.00", ""],
    ]


@pytest.mark.slow
def test_a_short_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "SCRATCH", tmp_path)
    arguments = ["--texts", "20", "--tokens", "16", "--calls", "3", "--runs", "1", "--dtypes", "float32"]
    monkeypatch.setattr(sys, "argv", ["embeddings", *arguments, "--out", str(tmp_path)])
    embeddings.main(SHAPE)
    (figures,) = json.loads((tmp_path / "embeddings.json").read_text())["figures"]
    assert [turn["side"] for turn in figures["turns"]] == ["Weft, one call", "Weft, 3 calls", Reference.name]
    assert figures["largest_difference"] < 1e-4
    assert all(turn["wall_s"] > 0 for turn in figures["turns"])
