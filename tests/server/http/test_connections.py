import json
import logging
import subprocess
import sys

import pytest

from weft.server.errors import MalformedHttpError
from weft.server.http.limits import LOG_EVERY_S, Connections
from weft.server.settings import Settings


@pytest.mark.parametrize(("soft", "hard", "raised"), [(64, 128, 128), (128, 128, 128)])
def test_the_soft_file_limit_is_raised_to_the_hard_one(soft: int, hard: int, raised: int) -> None:
    code = (
        "import json, resource, sys; from weft.server.http.limits import raise_file_limit;"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}));"
        "json.dump([raise_file_limit(), resource.getrlimit(resource.RLIMIT_NOFILE)], sys.stdout)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [raised, [raised, hard]]


@pytest.mark.parametrize(
    ("asked", "num_files", "max_num"), [(None, 1024, 768), (100, 1024, 100), (5000, 1024, 768), (None, 1, 1)]
)
def test_connections_take_a_share_of_the_files_or_what_is_set(asked: int | None, num_files: int, max_num: int) -> None:
    assert Connections(Settings(max_connections=asked), num_files).max_num == max_num


def test_refusals_are_logged_once_a_minute(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("weft.server.http.limits.time.monotonic", lambda: now)
    connections = Connections(Settings(), 100)
    with caplog.at_level(logging.WARNING):
        for _ in range(50):
            connections.note_refused(MalformedHttpError("m"))
        now += LOG_EVERY_S
        connections.note_refused(MalformedHttpError("m"))
    assert [vars(record)["num_requests"] for record in caplog.records] == [1, 50]
