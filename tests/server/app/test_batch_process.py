import asyncio
import os
import pathlib
import signal
from unittest.mock import AsyncMock, MagicMock

import pytest

from weft.server.app import batch_process
from weft.server.app.batch_process import Job
from weft.server.settings import Settings


class Interrupted:
    """Lines of which none is done when the supervisor tells to stop."""

    def __init__(self, *_: object) -> None:
        pass

    async def feed(self) -> None:
        signal.raise_signal(signal.SIGTERM)
        await asyncio.sleep(60)

    async def settle(self) -> None:
        pass


def test_who_is_told_to_stop_does_not_tell_the_supervisor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """Where the last results took long to write, it counted as a second Ctrl-C, and nobody said what was left."""
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *signal: told.append(signal))
    monkeypatch.setattr(batch_process, "connected_models", models := MagicMock())
    model = MagicMock()
    model.engine_client.load = AsyncMock()
    model.engine_client.info.max_num_seqs = 1
    models.return_value.__aenter__.return_value = {"m": model}, MagicMock(), []
    monkeypatch.setattr(batch_process, "create_app", MagicMock())
    monkeypatch.setattr(batch_process, "LineRun", Interrupted)
    job = Job("batch_1", "m", "in", str(tmp_path / "out"), str(tmp_path / "errors"), "/v1/completions", 1)
    asyncio.run(asyncio.wait_for(batch_process._run(job, Settings(), MagicMock(), tmp_path), 60))
    assert told == []
