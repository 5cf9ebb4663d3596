import contextlib
import fcntl
import os
import pathlib
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading

import pytest

from weft.server.settings import StartError
from weft.server.store.store import FILE_NAME, VERSION
from weft.server.supervise import runtime_folder
from weft.server.supervise.runtime_folder import MARK_NAME, MIN_FREE_BYTES

HOLDER = """
import os, signal
from weft.server.supervise.runtime_folder import runtime_folder
with runtime_folder() as path:
    print(path, flush=True)
    signal.pause()
"""


@pytest.fixture
def parent(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def no_room(monkeypatch: pytest.MonkeyPatch, *full: str) -> None:
    """Let these folders have no room."""
    disk_usage = runtime_folder.shutil.disk_usage

    def say(path: str) -> object:
        real = disk_usage(path)
        return real._replace(free=MIN_FREE_BYTES - 1) if path in full else real

    monkeypatch.setattr(runtime_folder.shutil, "disk_usage", say)


def test_the_folder_is_private_and_goes_away(parent: pathlib.Path) -> None:
    with runtime_folder.runtime_folder() as path:
        assert path.parent == parent
        assert path.stat().st_mode & 0o777 == 0o700
        assert runtime_folder.is_there(path)
    assert not path.exists()
    assert not runtime_folder.is_there(path)


def test_the_next_one_removes_what_a_killed_supervisor_left_and_nothing_else(parent: pathlib.Path) -> None:
    """After a kill -9 the folder stayed, with the keys in it."""
    living, killed = (
        subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True) for _ in range(2)
    )
    with living, killed:
        assert living.stdout is not None and killed.stdout is not None
        kept, left = (pathlib.Path(child.stdout.readline().strip()) for child in (living, killed) if child.stdout)
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert left.exists()
        (parent / "weft-mine").mkdir()  # somebody's own, without the mark
        elsewhere = parent / "elsewhere"
        elsewhere.mkdir()
        (elsewhere / MARK_NAME).touch()
        (parent / "weft-linked").symlink_to(elsewhere)
        (parent / "weft-file").touch()
        with runtime_folder.runtime_folder() as path:
            assert set(parent.iterdir()) == {
                *(path, kept, elsewhere),
                *(parent / name for name in ("weft-mine", "weft-linked", "weft-file")),
            }
        living.kill()


def test_a_new_folder_that_another_supervisor_looks_at_is_waited_for(
    parent: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two that started at the same moment, one could end with "no room for a runtime folder"."""
    make = tempfile.mkdtemp

    def looked_at(**where: str) -> str:
        path = make(**where)
        file = os.open(path, os.O_RDONLY)
        fcntl.flock(file, fcntl.LOCK_EX)
        threading.Timer(0.1, os.close, (file,)).start()
        return path

    monkeypatch.setattr(tempfile, "mkdtemp", looked_at)
    with runtime_folder.runtime_folder() as path:
        assert path.parent == parent


def test_where_there_is_no_room_another_place_is_taken(parent: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_room(monkeypatch, str(parent))
    with runtime_folder.runtime_folder() as path:
        assert path.parent == pathlib.Path("/tmp")


def test_no_room_anywhere_is_one_line(parent: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_room(monkeypatch, str(parent), "/tmp")
    with pytest.raises(StartError) as caught, runtime_folder.runtime_folder():
        pass
    assert str(caught.value) == (
        f"no room for a runtime folder ({parent}: less than 1 MiB are left; /tmp: less than 1 MiB are left); "
        "set XDG_RUNTIME_DIR to a folder with room"
    )


def test_what_was_begun_is_removed_where_it_cannot_be_finished(
    parent: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime_folder, "runtime_parents", lambda: [str(parent)])

    def refuse(path: pathlib.Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(runtime_folder, "StatusPage", refuse)
    with pytest.raises(StartError, match="No space left on device"), runtime_folder.runtime_folder():
        pass
    assert list(parent.iterdir()) == []


def test_long_runtime_path_is_not_used(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    for parent in (str(deep), "/no/such/folder"):
        monkeypatch.setenv("XDG_RUNTIME_DIR", parent)
        with contextlib.ExitStack() as stack:
            path = stack.enter_context(runtime_folder.runtime_folder())
            assert path.parent == pathlib.Path("/tmp")
        assert not path.exists()


def test_data_without_a_folder_goes_away_with_its_supervisor(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime_folder.tempfile, "tempdir", str(tmp_path))
    holder = HOLDER.replace("runtime_folder() as", "data_folder(None) as").replace("import runtime", "import data")
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", holder], stdout=subprocess.PIPE, env=environment) as killed:
        assert killed.stdout is not None
        left = pathlib.Path(killed.stdout.readline().decode().strip())
        killed.kill()
    assert (left / FILE_NAME).exists()
    with runtime_folder.data_folder(None) as folder:
        assert not left.exists()
        assert (folder.parent, folder.stat().st_mode & 0o777) == (tmp_path, 0o700)
    assert not folder.exists()


def test_a_data_folder_that_cannot_be_used_is_a_fault_of_the_start(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(StartError, match=f"data_dir: {tmp_path}/file/data cannot be used: Not a directory"),
        runtime_folder.data_folder(f"{tmp_path}/file/data"),
    ):
        pass
    with runtime_folder.data_folder(f"{tmp_path}/data") as folder:
        assert folder == tmp_path / "data"
    with sqlite3.connect(folder / FILE_NAME) as database:
        database.execute("PRAGMA user_version = 99")
    database.close()
    with (
        pytest.raises(StartError, match=f"the database has version 99, this Weft knows up to {VERSION}"),
        runtime_folder.data_folder(str(folder)),
    ):
        pass
