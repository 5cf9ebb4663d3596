"""What `weft launch` prints and starts, with programs in the agents' places that tell how they were started."""

import json
import os
import pathlib
import subprocess
from typing import Any

import pytest

from tests.server.cli.scripted_server import Script
from weft.server.cli.launch import AGENTS, launch

TELLS = """#!/usr/bin/env python3
import json, os, sys
print(json.dumps([sys.argv[1:], dict(os.environ)]))
"""


@pytest.fixture
def bin(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A folder with a program for each agent, before all others."""
    for agent in AGENTS:
        (tmp_path / agent).write_text(TELLS)
        (tmp_path / agent).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


@pytest.fixture
def coder(script: Script) -> Script:
    script.models = [{"id": "org/coder's", "max_model_len": 40960}, {"id": "long", "max_model_len": 262_144}, "b"]
    return script


def started(lines: str, key: str | None = None) -> tuple[list[str], dict[str, str]]:
    """How a shell starts the agent by these lines, as it tells itself."""
    clean = {"PATH": os.environ["PATH"]} | ({"OPENAI_API_KEY": key} if key else {})
    done = subprocess.run(["sh", "-c", lines], env=clean, capture_output=True, text=True, check=True, timeout=60)
    arguments, variables = json.loads(done.stdout)
    return arguments, variables


@pytest.mark.parametrize("key", [None, "sk 'secret'"])
@pytest.mark.parametrize("agent", AGENTS)
def test_printed_lines_and_run_start_the_same(
    coder: Script,
    bin: pathlib.Path,
    agent: str,
    key: str | None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(os, "execve", lambda *given: asked.append(given))
    assert launch(agent, coder.url, key, None, ["-p", "two words"], runs=False) == 0
    printed = capsys.readouterr()
    assert printed.err == "" and (key is None or key not in printed.out)
    arguments, variables = started(printed.out, key)
    launch(agent, coder.url, key, None, ["-p", "two words"], runs=True)
    ((program, command, environment),) = asked
    assert (program, command) == (str(bin / agent), [agent, *arguments])
    told = {name: value for name, value in environment.items() if os.environ.get(name) != value}
    assert told.items() <= variables.items()
    text = json.dumps([arguments, {name: variables[name] for name in told}])
    assert arguments[-2:] == ["-p", "two words"] and "org/coder's" in text and coder.url in text


def test_the_context_is_told_to_agents_that_do_not_ask(
    coder: Script, bin: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Claude Code takes every context for 200,000 tokens, and is told a share of a window of at least 100,000."""
    told = {}
    for model in ("org/coder's", "long", "b"):  # the last one does not say
        launch("claude", coder.url, None, model, [], runs=False)
        _, variables = started(capsys.readouterr().out)
        names = ("CLAUDE_CODE_AUTO_COMPACT_WINDOW", "CLAUDE_AUTOCOMPACT_PCT_OVERRIDE")
        told[model] = [variables.get(name) for name in names]
    assert told == {"org/coder's": ["100000", "30"], "long": [None, None], "b": [None, None]}
    launch("opencode", coder.url, None, None, [], runs=False)
    config = json.loads(started(capsys.readouterr().out)[1]["OPENCODE_CONFIG_CONTENT"])
    model = config["provider"]["weft"]["models"]["org/coder's"]
    assert (config["model"], model["limit"]) == ("weft/org/coder's", {"context": 40960, "output": 4096})
    launch("codex", coder.url, None, "long", [], runs=False)
    assert "model_context_window=262144" in started(capsys.readouterr().out)[0]


def test_faults_are_one_line(
    coder: Script, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert launch("codex", coder.url, None, "none", [], runs=False) == 1
    assert launch("codex", "http://127.0.0.1:1", None, None, [], runs=False) == 1
    monkeypatch.setenv("PATH", "/nowhere")
    assert launch("qwen", coder.url, None, None, [], runs=True) == 1
    printed = capsys.readouterr()
    first, second, third = printed.err.splitlines()
    assert first == f"weft: error: no such model: none ({coder.url}/v1 has org/coder's, long, b)"
    assert second.startswith("weft: error: cannot reach http://127.0.0.1:1/v1")
    assert third == "weft: error: qwen is not installed: npm install -g @qwen-code/qwen-code"
    assert printed.out == ""


def test_a_context_that_instructions_fill_is_told(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    script.models = [{"id": "weft-demo", "max_model_len": 4096}]
    assert launch("claude", script.url, None, None, [], runs=False) == 0
    assert "weft-demo has a context of 4096 tokens" in capsys.readouterr().err
