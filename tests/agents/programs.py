"""The agents: how each is told about the server, how it is run, and what its tools are called.

The lines that tell it are read from docs/agents.md. Every run has a home folder of its own and no variable of whoever
runs the tests.
"""

import json
import os
import pathlib
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tests.agents.script import call
from tests.agents.serve import NAME

AGENTS_FOLDER = pathlib.Path(__file__).parents[2] / ".agents"
DOCS = pathlib.Path(__file__).parents[2] / "docs/agents.md"
PROGRAMS = AGENTS_FOLDER / "node_modules/.bin"
PYTHON_PROGRAMS = AGENTS_FOLDER / "venv/bin"
TIMEOUT_S = 180.0


@dataclass(frozen=True)
class Place:
    """Where an agent runs: its home, the folder that it works in, and the server's address.

    Attributes:
        is_small: Whether the agent is told that its context is full after one long result.
    """

    home: pathlib.Path
    work: pathlib.Path
    url: str
    is_small: bool = False


Say = Callable[..., str]


@dataclass(frozen=True)
class Agent:
    """An agent.

    Attributes:
        command: Arguments before the task. URL stands for the server's address.
        resume: Arguments before the task that go on with the last session of the folder.
        exported: What it is told about the server by variables.
        environment: Further variables.
        if_small: Further variables where its context is small.
        configure: Writes its files of settings.
        shell, write, read, edit: What a model says to use its tools.
    """

    command: tuple[str, ...]
    resume: tuple[str, ...] = ()
    exported: Callable[[Place], dict[str, str]] = lambda place: {}
    environment: Mapping[str, str] = field(default_factory=dict)
    if_small: Mapping[str, str] = field(default_factory=dict)
    configure: Callable[[Place], None] = lambda place: None
    shell: Say = call
    write: Say = call
    read: Say = call
    edit: Say = call

    def start(self, place: Place, task: str, *, resumes: bool = False) -> "subprocess.Popen[bytes]":
        """Start it on a task; its output goes to a file in its home."""
        if not (place.work / ".git").exists():
            subprocess.run(["git", "init", "-q"], cwd=place.work, check=True)
        self.configure(place)
        environment = {"PATH": os.environ["PATH"], "HOME": str(place.home), "TERM": "dumb"}
        environment |= self.exported(place) | self.environment | (self.if_small if place.is_small else {})
        with (place.home / "output.txt").open("ab") as output:
            return subprocess.Popen(
                [part.replace("URL", place.url) for part in (self.resume if resumes else self.command)] + [task],
                cwd=place.work,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def run(self, place: Place, task: str, *, resumes: bool = False) -> int:
        """Run it to its end; returns the exit code."""
        process = self.start(place, task, resumes=resumes)
        try:
            return process.wait(TIMEOUT_S)
        finally:
            end(process)


def end(process: "subprocess.Popen[bytes]", signum: int = signal.SIGKILL) -> None:
    """End an agent and what it started."""
    if process.poll() is None or signum == signal.SIGKILL:
        try:
            os.killpg(process.pid, signum)
        except ProcessLookupError:
            return
        process.wait(TIMEOUT_S)


def wait_for(is_true: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not is_true():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.05)


def _lines(heading: str, language: str, place: Place) -> str:
    """What docs/agents.md has one paste for an agent, with this server's address, model and context."""
    section = DOCS.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    block = section.split(f"```{language}\n")[1].split("```")[0]
    context = "16384" if place.is_small else "131072"
    return block.replace("http://127.0.0.1:8000", place.url).replace("coder", NAME).replace("40960", context)


def _exported(heading: str) -> Callable[[Place], dict[str, str]]:
    """The variables that the documentation exports."""

    def read(place: Place) -> dict[str, str]:
        lines = [line for line in _lines(heading, "sh", place).splitlines() if line.startswith("export ")]
        return dict(part.split("=", 1) for line in lines for part in shlex.split(line)[1:])

    return read


def _codex(place: Place) -> None:
    (place.home / ".codex").mkdir(exist_ok=True)
    first = "model_auto_compact_token_limit = 12000\n" if place.is_small else ""
    (place.home / ".codex/config.toml").write_text(first + _lines("Codex", "toml", place))


def _opencode(place: Place) -> None:
    settings = json.loads(_lines("opencode", "json", place))
    (place.work / "opencode.json").write_text(json.dumps(settings | {"permission": "allow", "share": "disabled"}))


def _qwen(place: Place) -> None:
    (place.home / ".qwen").mkdir(exist_ok=True)
    settings = {"model": {"chatCompression": {"contextPercentageThreshold": 0.15}}} if place.is_small else {}
    (place.home / ".qwen/settings.json").write_text(json.dumps(settings))


_SMOLAGENTS = (str(PYTHON_PROGRAMS / "python"), str(pathlib.Path(__file__).with_name("use_smolagents.py")))
_PATCH = """\
apply_patch <<'EOF'
*** Begin Patch
*** Update File: {path}
@@
-{old}
+{new}
*** End Patch
EOF"""


def _codex_shell(command: str) -> str:
    return call("exec_command", cmd=command)


_CODEX = (str(PROGRAMS / "codex"), "exec")
_CODEX_FLAGS = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
_CLAUDE = (str(PROGRAMS / "claude"), "--model", NAME, "--dangerously-skip-permissions")
_QWEN = (str(PROGRAMS / "qwen"), "--auth-type", "openai", "--yolo")
_OPENCODE = (str(PROGRAMS / "opencode"), "run")

CALLERS = ("claude", "codex", "opencode", "qwen")
"""Those with tools for files and a shell."""

AGENTS = {
    "codex": Agent(
        command=(*_CODEX, *_CODEX_FLAGS),
        resume=(*_CODEX, "resume", "--last", *_CODEX_FLAGS),
        configure=_codex,
        shell=_codex_shell,
        write=lambda path, text: _codex_shell(f"cat > {path} <<'EOF'\n{text}EOF"),
        read=lambda path: _codex_shell(f"cat {path}"),
        edit=lambda path, old, new: _codex_shell(_PATCH.format(path=path, old=old, new=new)),
    ),
    "claude": Agent(
        command=(*_CLAUDE, "-p"),
        resume=(*_CLAUDE, "--continue", "-p"),
        exported=_exported("Claude Code"),
        environment={"IS_SANDBOX": "1"},
        if_small={"CLAUDE_CODE_AUTO_COMPACT_WINDOW": "100000", "CLAUDE_AUTOCOMPACT_PCT_OVERRIDE": "30"},
        shell=lambda command: call("Bash", command=command, description="Runs it"),
        write=lambda path, text: call("Write", file_path=path, content=text),
        read=lambda path: call("Read", file_path=path),
        edit=lambda path, old, new: call("Edit", file_path=path, old_string=old, new_string=new),
    ),
    "qwen": Agent(
        command=(*_QWEN, "-p"),
        resume=(*_QWEN, "--continue", "-p"),
        exported=_exported("qwen-code"),
        configure=_qwen,
        shell=lambda command: call("run_shell_command", command=command, is_background=False),
        write=lambda path, text: call("write_file", file_path=path, content=text),
        read=lambda path: call("read_file", file_path=path),
        edit=lambda path, old, new: call("edit", file_path=path, old_string=old, new_string=new),
    ),
    "opencode": Agent(
        command=_OPENCODE,
        resume=(*_OPENCODE, "--continue"),
        environment={"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"},
        configure=_opencode,
        shell=lambda command: call("bash", command=command),
        write=lambda path, text: call("write", content=text, filePath=path),
        read=lambda path: call("read", filePath=path),
        edit=lambda path, old, new: call("edit", filePath=path, oldString=old, newString=new),
    ),
    "aider": Agent(
        command=(
            *(str(PYTHON_PROGRAMS / "aider"), "--model", f"openai/{NAME}", "--edit-format", "diff", "--yes-always"),
            *("--no-check-update", "--no-show-model-warnings", "--analytics-disable", "--no-gitignore"),
            *("--auto-test", "--test-cmd", "python3 -c 'import sums; assert sums.add(1, 2) == 3'"),
            *("sums.py", "--message"),
        ),
        exported=_exported("aider"),
    ),
    "smolagents-tools": Agent(command=(*_SMOLAGENTS, "tools", "URL", NAME)),
    "smolagents-code": Agent(command=(*_SMOLAGENTS, "code", "URL", NAME)),
}
