"""benchmarks/start: medians of starts, and the CPU time of a process with its children."""

import os
import subprocess
import sys

from benchmarks.start import Start, cpu_seconds, median, parse, table


def test_each_field_has_its_own_median() -> None:
    starts = [Start(1.0, 3.0, 0.01, 2.0), Start(2.0, 2.0, 0.03, 9.0), Start(3.0, 1.0, 0.02, 4.0)]
    found = median(starts)
    assert found == {"ready_s": 2.0, "answered_s": 2.0, "later_s": 0.02, "cpu_s": 4.0}
    assert [list(column.cells)[1] for column in table(0.9, {"m": found}).columns] == [
        *("m", "2.00 s", "2.00 s", "4.00 s", "20.0 ms")
    ]
    assert parse([]).model == []


def test_children_count() -> None:
    code = "import time; t = time.process_time()\nwhile time.process_time() - t < 0.3: pass\nprint(flush=True); input()"
    before = cpu_seconds(os.getpid())
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout and child.stdout.readline()
        assert cpu_seconds(os.getpid()) - before >= 0.25
        child.communicate(b"\n")
