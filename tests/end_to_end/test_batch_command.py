"""`weft batch`: each line is answered once, whatever ends the command; what is wrong is told before anything starts."""

import fcntl
import json
import pathlib
import re
import subprocess
import sys
import time
from typing import Any

from tests.end_to_end.conftest import TIMEOUT_S
from tests.pseudo_terminal import PseudoTerminal

NUM_LINES = 400
COMPLETIONS = "/v1/completions"


def write(path: pathlib.Path, *bodies: dict[str, Any], url: str = COMPLETIONS) -> pathlib.Path:
    lines = [{"custom_id": f"r{i}", "method": "POST", "url": url, "body": body} for i, body in enumerate(bodies)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def command(source: pathlib.Path, output: pathlib.Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "weft.server", "batch", str(source), "-o", str(output), *arguments]


def run(source: pathlib.Path, output: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(source, output, *arguments), capture_output=True, text=True, timeout=TIMEOUT_S)


def test_what_was_ended_goes_on_and_each_line_is_answered_once(tmp_path: pathlib.Path) -> None:
    body = {"prompt": "Say", "temperature": 0, "max_tokens": 16, "ignore_eos": True}
    source = write(tmp_path / "in.jsonl", {"prompt": "x", "max_tokens": -1}, *[body] * NUM_LINES)
    output = tmp_path / "out.jsonl"
    for how in ("killed", "interrupted"):
        seen = output.read_bytes().count(b"\n") if output.exists() else 0
        one_by_one = command(source, output, "--max-num-seqs", "1")  # so that none reaches its end before it is ended
        with PseudoTerminal(one_by_one) as terminal:
            terminal.wait_for(lambda lines: any(re.search(rf"lines .*\d+/{NUM_LINES + 1}", line) for line in lines))
            deadline = time.monotonic() + TIMEOUT_S
            while output.read_bytes().count(b"\n") <= seen:
                assert time.monotonic() < deadline
                time.sleep(0.002)
            if how == "interrupted":
                terminal.type("\x03")
                assert terminal.wait() == 1
                assert "are left, and the same command goes on with them" in " ".join(terminal.lines)
        assert output.read_bytes().count(b"\n") < NUM_LINES  # leaving it on its own killed it
    done = run(source, output)
    assert done.returncode == 1, done.stderr
    last = done.stderr.splitlines()[-1]
    assert (
        f"{NUM_LINES} of {NUM_LINES + 1} lines answered in {output}, 1 failed: see {tmp_path}/out.errors.jsonl" in last
    )
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    assert sorted(answer["custom_id"] for answer in answers) == sorted(f"r{i}" for i in range(1, NUM_LINES + 1))
    assert len({answer["response"]["body"]["choices"][0]["text"] for answer in answers}) == 1
    (failure,) = [json.loads(line) for line in (tmp_path / "out.errors.jsonl").read_text().splitlines()]
    assert (failure["custom_id"], failure["error"]["line"]) == ("r0", 1)
    assert "max_tokens must be at least 1, got -1" in failure["error"]["message"]


def test_all_answered_is_no_failure_and_settings_count(tmp_path: pathlib.Path) -> None:
    source = write(tmp_path / "in.jsonl", {"model": "mine", "prompt": "Say", "max_tokens": 1})
    done = run(source, tmp_path / "out.jsonl", "--served-model-name", "mine")
    assert done.returncode == 0, done.stderr
    assert "chat at" not in done.stderr  # nobody can reach it
    assert not (tmp_path / "out.errors.jsonl").exists()
    assert json.loads((tmp_path / "out.jsonl").read_text())["response"]["body"]["model"] == "mine"


def test_faults_are_told_before_an_engine_starts(tmp_path: pathlib.Path) -> None:
    def refusal(source: pathlib.Path, output: pathlib.Path) -> str:
        done = run(source, output)
        assert done.returncode == 2, done.stderr
        assert "engine:" not in done.stderr
        return done.stderr

    output, good = tmp_path / "out.jsonl", {"prompt": "x"}
    source = write(tmp_path / "in.jsonl", good, {**good, "stream": True})
    assert f"{source}:2: body.stream cannot be used in a batch" in refusal(source, output)
    assert "asks for the model 'other', and this one is weft-demo" in refusal(
        write(source, {"model": "other", **good}), output
    )
    assert "url must be one of /v1/chat/completions, " in refusal(write(source, good, url="/v1/files"), output)
    assert "cannot be read: no such file" in refusal(tmp_path / "nothing", output)
    output.write_text('{"my": "notes"}\n')
    assert "holds something else than results" in refusal(write(source, good), output)
    assert output.read_text() == '{"my": "notes"}\n'
    with output.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert "is being written by another command" in refusal(source, output)
    assert "cannot be written: no such file" in refusal(source, tmp_path / "nowhere" / "out.jsonl")
