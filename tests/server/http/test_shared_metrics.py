"""In processes of their own: the client library decides once a process where metrics are kept."""

import pathlib
import subprocess
import sys

CHILD = """
import importlib.util, logging, pathlib, sys
logging.basicConfig()
from weft.server.http import metrics as shared_metrics
spec = importlib.util.spec_from_file_location("fakes", sys.argv[1])
fakes = importlib.util.module_from_spec(spec)
sys.modules["fakes"] = fakes
spec.loader.exec_module(fakes)
shared_metrics.share_metrics(pathlib.Path(sys.argv[2]))
site = fakes.Site()
site.chat()
EDIT
print(site.call("GET", "/metrics").text)
"""


def run(folder: pathlib.Path, edit: str = "") -> tuple[str, str]:
    """What a server process that got one request says, and its log."""
    conftest = pathlib.Path(__file__).parents[1] / "conftest.py"
    command = [sys.executable, "-c", CHILD.replace("EDIT", edit), str(conftest), str(folder)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout, done.stderr


def num_requests(text: str) -> float:
    (line,) = [line for line in text.splitlines() if line.startswith("weft:e2e_request_latency_seconds_count")]
    return float(line.rsplit(" ", 1)[1])


def test_processes_add_up_and_their_files_have_room_on_the_disk(tmp_path: pathlib.Path) -> None:
    """A page of such a file that found no room killed the server with SIGBUS."""
    assert [num_requests(run(tmp_path)[0]) for _ in range(2)] == [1, 2]
    files = sorted(tmp_path.iterdir())
    assert [file.name.split("_")[0] for file in files] == ["counter"] * 2 + ["histogram"] * 2
    for file in files:
        status = file.stat()
        used = int.from_bytes(file.read_bytes()[:4], sys.byteorder)
        assert status.st_blocks * 512 >= status.st_size >= 2 * used, file


def test_where_there_is_no_room_a_process_counts_for_itself(tmp_path: pathlib.Path) -> None:
    full = tmp_path / "file"
    full.touch()  # nothing can be made in it
    text, log = run(full)
    assert num_requests(text) == 1
    assert "no other server process's numbers: no room in" in log
    assert num_requests(run(full)[0]) == 1


def test_a_folder_that_is_lost_costs_the_others_numbers(tmp_path: pathlib.Path) -> None:
    """A logout removes it, and /metrics was 500 from then on."""
    folder = tmp_path / "metrics"
    folder.mkdir()
    text, _ = run(folder, f"import shutil; shutil.rmtree({str(folder)!r})")
    assert num_requests(text) == 1
