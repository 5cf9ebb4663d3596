"""Every `CrashRecord` made on the same directory is one engine process; making the next one is a crash."""

import pathlib

import msgspec
import pytest

from tests.engine.requests_for_tests import add_request
from weft.engine.loop import crash_record
from weft.engine.loop.crash_record import CrashRecord, fingerprint
from weft.engine.wire.messages import STEP_NAME, SUSPECTS_NAME, BeamOptions
from weft.engine.wire.options import Adapter

A, B, C = (bytes([letter]) * 16 for letter in b"ABC")


def test_a_first_engine_suspects_nobody(tmp_path: pathlib.Path) -> None:
    record = CrashRecord(tmp_path)
    assert not record.is_suspect(A)
    assert not record.is_condemned(A)


def test_the_requests_of_the_last_step_are_suspects(tmp_path: pathlib.Path) -> None:
    record = CrashRecord(tmp_path)
    record.begin_step([A, B, C])
    record.begin_step([A, B])
    record = CrashRecord(tmp_path)
    assert [record.is_suspect(r) for r in (A, B, C)] == [True, True, False]
    assert not record.is_condemned(A)


def test_an_engine_that_dies_between_steps_leaves_no_suspects(tmp_path: pathlib.Path) -> None:
    record = CrashRecord(tmp_path)
    record.begin_step([A])
    record.end_step()
    assert not CrashRecord(tmp_path).is_suspect(A)


def test_a_suspect_that_kills_the_engine_alone_is_condemned(tmp_path: pathlib.Path) -> None:
    CrashRecord(tmp_path).begin_step([A, B])
    CrashRecord(tmp_path).begin_step([A])
    record = CrashRecord(tmp_path)
    assert (record.is_condemned(A), record.is_suspect(A)) == (True, False)
    assert (record.is_condemned(B), record.is_suspect(B)) == (False, True)
    record = CrashRecord(tmp_path)
    assert record.is_condemned(A)


def test_a_suspect_that_survives_is_cleared(tmp_path: pathlib.Path) -> None:
    CrashRecord(tmp_path).begin_step([A, B])
    record = CrashRecord(tmp_path)
    record.begin_step([B])
    record.clear(B)
    record.end_step()
    record.clear(C)  # never suspect
    record = CrashRecord(tmp_path)
    assert (record.is_suspect(A), record.is_suspect(B), record.is_condemned(B)) == (True, False, False)
    record.begin_step([B])  # dies with an engine again: suspect anew, not condemned at once
    record = CrashRecord(tmp_path)
    assert (record.is_suspect(B), record.is_condemned(B)) == (True, False)


def test_a_suspect_beside_others_is_not_condemned(tmp_path: pathlib.Path) -> None:
    CrashRecord(tmp_path).begin_step([A])
    CrashRecord(tmp_path).begin_step([A, B])
    record = CrashRecord(tmp_path)
    assert [record.is_suspect(r) for r in (A, B)] == [True, True]
    assert not record.is_condemned(A)


def test_suspects_survive_an_engine_that_dies_while_loading(tmp_path: pathlib.Path) -> None:
    CrashRecord(tmp_path).begin_step([A])
    CrashRecord(tmp_path)
    CrashRecord(tmp_path)
    assert CrashRecord(tmp_path).is_suspect(A)


def test_memory_is_bounded_and_forgets_the_oldest(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crash_record, "_MAX_REMEMBERED", 2)
    CrashRecord(tmp_path).begin_step([A])
    CrashRecord(tmp_path).begin_step([B, C])
    record = CrashRecord(tmp_path)
    assert [record.is_suspect(r) for r in (A, B, C)] == [False, True, True]


def test_a_fingerprint_says_what_is_computed_and_not_who_asks() -> None:
    base = fingerprint(add_request([1, 2], 1, seed=1, temperature=0.5))
    assert len(base) == 16
    assert base == fingerprint(add_request([1, 2], 2, seed=9, temperature=0.5, priority=3, deadline=1.0))
    others = [
        add_request([1, 3], 1, temperature=0.5),
        add_request([1, 2], 1, temperature=0.6),
        add_request([1, 2], 1, temperature=0.5, num_choices=2),
        msgspec.structs.replace(add_request([1, 2], 1, temperature=0.5), beams=BeamOptions()),
        msgspec.structs.replace(add_request([1, 2], 1, temperature=0.5), adapter=Adapter("formal", "/formal", "0")),
    ]
    assert len({base, *map(fingerprint, others)}) == 6


def test_suspicion_and_condemnation_expire(tmp_path: pathlib.Path) -> None:
    now = 1000.0
    CrashRecord(tmp_path, lambda: now).begin_step([A, B])
    CrashRecord(tmp_path, lambda: now).begin_step([A])
    CrashRecord(tmp_path, lambda: now)
    now += crash_record.EXPIRY_S / 2
    CrashRecord(tmp_path, lambda: now).begin_step([C])
    record = CrashRecord(tmp_path, lambda: now)
    now += crash_record.EXPIRY_S / 2 - 1
    assert (record.is_condemned(A), record.is_suspect(B), record.is_suspect(C)) == (True, True, True)
    now += 1
    assert (record.is_condemned(A), record.is_suspect(B), record.is_suspect(C)) == (False, False, True)
    record.begin_step([B])  # an old suspicion is none: it is suspect anew, not condemned
    record = CrashRecord(tmp_path, lambda: now)
    assert (record.is_condemned(B), record.is_suspect(B)) == (False, True)


def test_a_step_that_the_supervisor_removed_makes_no_suspects(tmp_path: pathlib.Path) -> None:
    """The engine was killed from outside: twice by the out-of-memory killer made innocent requests poison for ever."""
    CrashRecord(tmp_path).begin_step([A])
    CrashRecord(tmp_path).begin_step([A])
    (tmp_path / STEP_NAME).unlink()
    record = CrashRecord(tmp_path)
    assert (record.is_suspect(A), record.is_condemned(A)) == (True, False)


def test_what_could_not_be_saved_is_known_all_the_same(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    CrashRecord(tmp_path).begin_step([A])
    (tmp_path / SUSPECTS_NAME).unlink()
    monkeypatch.setattr(CrashRecord, "_save", lambda _: None)
    assert CrashRecord(tmp_path).is_suspect(A)


def test_an_operator_clears_the_record_of_a_running_engine(tmp_path: pathlib.Path) -> None:
    for _ in range(2):
        CrashRecord(tmp_path).begin_step([A])
    CrashRecord(tmp_path).begin_step([B])
    record = CrashRecord(tmp_path)
    assert (record.is_condemned(A), record.is_suspect(B)) == (True, True)
    (tmp_path / SUSPECTS_NAME).unlink()
    record.clear(B)  # which must not write the rest again
    assert (record.is_condemned(A), record.is_suspect(B)) == (False, False)
    assert not CrashRecord(tmp_path).is_condemned(A)


def test_a_full_disk_costs_the_record_and_not_the_engine(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine could not start again: an unsaved record ended it."""
    CrashRecord(tmp_path).begin_step([A])

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pathlib.Path, "write_bytes", refuse)
    record = CrashRecord(tmp_path)
    assert record.is_suspect(A)  # this one knows
    assert "cannot be saved (No space left on device)" in caplog.text
    monkeypatch.setattr(crash_record.os, "posix_fallocate", refuse)
    record = CrashRecord(tmp_path)
    assert "No room for the crash record (No space left on device)" in caplog.text
    record.begin_step([A])
    record.end_step()


def test_its_memory_has_room_on_the_disk(tmp_path: pathlib.Path) -> None:
    """A page that found no room when it was first written to killed the engine with SIGBUS."""
    CrashRecord(tmp_path)
    status = (tmp_path / STEP_NAME).stat()
    assert status.st_blocks * 512 >= status.st_size > 65_000
