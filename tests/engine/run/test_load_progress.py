import logging
import pathlib

import pytest

from weft.engine.run import load_progress
from weft.engine.run.load_progress import LoadProgress
from weft.engine.shared.status_page import Status, StatusPage


def test_the_page_says_how_far_it_is_and_the_log_now_and_then(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = StatusPage(tmp_path / "status")
    page.write(Status(epoch_id=7))
    caplog.set_level(logging.INFO)
    progress = LoadProgress(page)
    progress(1_000_000, 4_000_000)
    status = page.read()
    assert (status.epoch_id, status.loaded_bytes, status.total_bytes) == (7, 1_000_000, 4_000_000)
    assert status.progress_time > 0
    assert caplog.messages == []
    monkeypatch.setattr(load_progress, "_LOG_EVERY_S", 0.0)
    progress(2_000_000, 4_000_000)
    assert caplog.messages == ["loading weights: 2 of 4 MB"]
