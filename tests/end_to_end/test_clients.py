"""Clients that people put in front of Weft, each in its own words: `tests/clients/use_*.py`."""

import os
import pathlib
import subprocess

import pytest

from tests.end_to_end.conftest import TIMEOUT_S, LiveServer

ROOT = pathlib.Path(__file__).parents[2]
PYTHON = ROOT / ".venv-clients" / "bin" / "python"
SCRIPTS = sorted((ROOT / "tests" / "clients").glob("use_*.py"))


@pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-clients, which `make test` makes")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_the_client_is_content(live_server: LiveServer, script: pathlib.Path) -> None:
    # Nothing of this process's Python may reach the other virtual environment.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [PYTHON, script, live_server.base_url, "weft-demo"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == "good", ran.stdout


def test_no_client_is_forgotten() -> None:
    assert [script.stem for script in SCRIPTS] == [
        "use_instructor",
        "use_langchain",
        "use_litellm",
        "use_pydantic_ai",
        "use_pydantic_ai_messages",
    ]
