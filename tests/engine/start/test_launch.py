import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[3]


def launch(folder: pathlib.Path, text: str) -> "subprocess.CompletedProcess[str]":
    (folder / "child.py").write_text(text)
    command = [sys.executable, "-m", "weft.engine.start.launch", "child", "a", "b"]
    paths = f"{ROOT}:{folder}"
    return subprocess.run(command, env={"PYTHONPATH": paths}, capture_output=True, text=True, check=False)


def test_a_module_runs_as_if_by_itself(tmp_path: pathlib.Path) -> None:
    done = launch(tmp_path, "import sys\nif __name__ == '__main__':\n    print(sys.argv)\n    sys.exit(7)")
    assert (done.returncode, done.stderr) == (7, "")
    assert done.stdout == f"[{str(tmp_path / 'child.py')!r}, 'a', 'b']\n"


@pytest.mark.parametrize("text", ["raise MemoryError", "import errno\nraise OSError(errno.ENOMEM, 'no')"])
def test_a_limit_is_one_line_and_exit_code_2(tmp_path: pathlib.Path, text: str) -> None:
    done = launch(tmp_path, text)
    assert done.returncode == 2
    assert done.stderr.startswith("weft: error: child: memory ran out; ")
    assert done.stderr.count("\n") == 1


def test_other_faults_keep_their_traceback(tmp_path: pathlib.Path) -> None:
    done = launch(tmp_path, "raise ValueError('no')")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert done.stderr.endswith("ValueError: no\n")
