"""`weft chat` and `weft serve` on a terminal, as a user meets them."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time

import httpx
import pytest

from tests.end_to_end.conftest import TIMEOUT_S, LiveServer, reserved_port
from tests.pseudo_terminal import PseudoTerminal
from tests.server.cli.scripted_server import END, Script, event, serving
from weft.server.supervise.supervisor import REPEAT_S

SUMMARY = re.compile(r"\d+ tokens, ([\d.,]+ tokens/s, )?first after \d+\.\d\d s")
"""Without a rate where all tokens came at once, as they do to a client that has to wait for its processor."""


def chat(url: str, state: pathlib.Path, *arguments: str, **environment: str) -> PseudoTerminal:
    command = [sys.executable, "-m", "weft.server", "chat", "--url", url, *arguments]
    return PseudoTerminal(command, XDG_STATE_HOME=str(state), OPENAI_API_KEY="", **environment)


def wait_for_prompt(terminal: PseudoTerminal) -> None:
    terminal.wait_for(lambda lines: lines[-1:] == ["> "])


def ask(terminal: PseudoTerminal, *lines: str) -> None:
    """Type a message when it is wanted, and wait until the next one is."""
    wait_for_prompt(terminal)
    num_lines = len(terminal.lines)
    terminal.type("\n".join(lines) + "\n")
    terminal.wait_for(lambda seen: len(seen) > num_lines + len(lines) and seen[-1] == "> ")


def piped(question: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "weft.server", "chat", *arguments]
    clean = os.environ | {"OPENAI_API_KEY": "", "OPENAI_BASE_URL": ""} | environment
    return subprocess.run(command, input=question, env=clean, capture_output=True, text=True, timeout=TIMEOUT_S)


def test_a_conversation(live_server: LiveServer, tmp_path: pathlib.Path) -> None:
    with chat(live_server.base_url, tmp_path, "--temperature", "0") as terminal:
        terminal.wait_for(f"weft-demo at {live_server.base_url}/v1; /help lists commands, Ctrl-D leaves")
        ask(terminal, "What is 2 + 2?")
        assert terminal.lines[-3] == "2 + 2 = 4."
        assert SUMMARY.fullmatch(terminal.lines[-2])
        ask(terminal, "/retry")
        assert terminal.lines[-3] == "2 + 2 = 4."
        ask(terminal, '"""What is', '3 + 4?"""')
        ask(terminal, "/sing")
        assert terminal.lines[-2].startswith("no such command: /sing")
        ask(terminal, "/model")
        assert terminal.lines[-2] == "* weft-demo"
        ask(terminal, f"/save {tmp_path}/chat.json")
        ask(terminal, "/set max_tokens 2")
        ask(terminal, "What is 2 + 2?")
        assert terminal.lines[-2].endswith("cut at the token limit")
        terminal.type("/bye\n")
        assert terminal.wait() == 0
        assert terminal.attributes == terminal.before
    messages = json.loads((tmp_path / "chat.json").read_text())
    assert [message["role"] for message in messages] == ["user", "assistant", "user", "assistant"]
    assert messages[2]["content"] == "What is\n3 + 4?"
    with chat(live_server.base_url, tmp_path, "--temperature", "0") as terminal:
        wait_for_prompt(terminal)
        terminal.type("\x1b[A" * 9)  # up to the first message of the other day
        terminal.wait_for("> What is 2 + 2?")
        terminal.type("\n")
        terminal.wait_for("2 + 2 = 4.")


def test_interrupt_stops_the_answer_and_keeps_it(tmp_path: pathlib.Path) -> None:
    hold = threading.Event()
    padding = [event() for _ in range(2000)]  # which a client that has left does not take
    script = Script([event(reasoning="Hm. "), event(content="Half an "), event(content="answer"), hold.wait, *padding])
    with serving(script), chat(script.url, tmp_path) as terminal:
        wait_for_prompt(terminal)
        terminal.type("Hi\n")
        terminal.wait_for("Half an answer")
        terminal.type("\x03")
        terminal.wait_for("stopped")
        summary = next(line for line in terminal.lines if "stopped" in line)
        assert summary.startswith("about 3 tokens, ")
        assert SUMMARY.fullmatch(summary.removeprefix("about ").removesuffix(", stopped"))
        hold.set()
        assert script.is_left.wait(TIMEOUT_S)
        assert "\x1b[2mHm.\x1b[0m" in terminal.raw  # reasoning is dim
        script.pieces = [event(content="Yes."), END]
        ask(terminal, "Go on")
        assert script.asked[1]["messages"] == [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Half an answer"},
            {"role": "user", "content": "Go on"},
        ]
        terminal.type("half a line")
        terminal.wait_for("> half a line")
        terminal.type("\x03")  # at the prompt it drops the line
        wait_for_prompt(terminal)
        terminal.type("\x04")
        assert terminal.wait() == 0


def test_a_refused_message_can_be_brought_back(tmp_path: pathlib.Path) -> None:
    script = Script(refuse=lambda _: (503, b'{"error": {"message": "queue \\u001b[2Jfull"}}'))
    with serving(script), chat(f"{script.url}/v1", tmp_path, "--api-key", "k") as terminal:
        ask(terminal, "Hello you")
        assert terminal.lines[-2:] == ["503: queue [2Jfull", "> "]
        script.refuse = lambda _: None
        terminal.type("\x1b[A")
        terminal.wait_for(lambda lines: lines[-1] == "> Hello you")
        terminal.type("\n")
        terminal.wait_for(lambda lines: "about 1 token," in lines[-2])
        assert script.asked[1]["messages"] == [{"role": "user", "content": "Hello you"}]
        assert script.headers[-1]["Authorization"] == "Bearer k"


def test_pasted_lines_are_one_message_and_a_dumb_terminal_gets_text(tmp_path: pathlib.Path) -> None:
    script = Script()
    with serving(script), chat(script.url, tmp_path) as terminal:
        wait_for_prompt(terminal)
        terminal.type("\x1b[200~one\ntwo\x1b[201~")
        terminal.wait_for("two")
        ask_now = len(terminal.lines)
        terminal.type("\n")
        terminal.wait_for(lambda lines: len(lines) > ask_now and lines[-1] == "> ")
    with serving(script), chat(script.url, tmp_path, TERM="dumb") as terminal:
        ask(terminal, "Hi")
        assert "Hi." in terminal.lines
        assert "\x1b" not in terminal.raw
    assert [body["messages"][-1]["content"] for body in script.asked] == ["one\ntwo", "Hi"]


def test_a_pipe_is_answered_once(live_server: LiveServer) -> None:
    done = piped("What is 2 + 2?\n", "--temperature", "0", OPENAI_BASE_URL=f"{live_server.base_url}/v1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "2 + 2 = 4.\n", "")


def test_a_prompt_is_answered_once(tmp_path: pathlib.Path) -> None:
    script = Script()
    with serving(script):
        for given in ("", "two\n"):
            done = piped(given, "one", "--url", script.url)
            assert (done.returncode, done.stdout, done.stderr) == (0, "Hi.\n", "")
        with chat(script.url, tmp_path, "three") as terminal:
            assert terminal.wait() == 0
    assert [body["messages"][0]["content"] for body in script.asked] == ["one", "one\n\ntwo", "three"]


@pytest.mark.parametrize(
    ("question", "arguments", "fault"),
    [
        ("Hi", ("--model", "none"), "404: the model 'none' does not exist"),
        ("Hi", ("--temperature", "9"), "400: temperature must be between 0.0 and 2.0, got 9.0"),
        (" \n", (), "standard input holds no message"),
    ],
)
def test_a_pipe_that_fails_says_so(
    live_server: LiveServer, question: str, arguments: tuple[str, ...], fault: str
) -> None:
    done = piped(question, "--url", live_server.base_url, *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"weft: error: {fault}")
    assert done.stderr.count("\n") == 1


def test_serve_shows_what_it_does_and_leaves_the_terminal_as_it_was(long_model: str) -> None:
    with reserved_port() as port:
        url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "weft.server", "serve", long_model, "--port", str(port), "--dtype", "float32"]
        show_a_server(command, url)


def show_a_server(command: list[str], url: str) -> None:
    with PseudoTerminal(command, columns=120, NO_COLOR="1") as terminal:
        idle = "idle | KV cache 0% | Press Ctrl-C to stop"
        served = f"Serving weft-demo: chat at {url}/, API at {url}/v1"
        terminal.wait_for(served)  # an engine that is up is idle a moment before its front end serves
        terminal.wait_for(lambda lines: lines[-1:] == [idle])
        text = "\n".join(terminal.lines)
        for start in ("model        weft-demo", "device       cpu", "weights      ", served):
            assert re.search(rf"^\d\d:\d\d:\d\d {re.escape(start)}", text, re.MULTILINE), start
        body = {"model": "weft-demo", "messages": [{"role": "user", "content": "Hi"}]}
        request = body | {"ignore_eos": True, "stream": True}  # until the context is full
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=request, timeout=TIMEOUT_S) as response:
            lines = response.iter_lines()
            next(lines)
            terminal.wait_for(lambda seen: bool(re.match(r"1 running, 0 waiting \| decode [1-9]", seen[-1])))
            terminal.type("\x03")
            terminal.wait_for(lambda seen: "Draining" in seen[-2] and seen[-1].startswith("1 running"))
            time.sleep(REPEAT_S)
            terminal.type("\x03")
            assert terminal.wait() == 1
        assert any(line.endswith("Forced to end; running requests are cut") for line in terminal.lines)
        assert terminal.attributes == terminal.before


def test_a_dumb_terminal_gets_plain_lines() -> None:
    command = [sys.executable, "-m", "weft.server", "serve", "--port", "0", "--dtype", "float32"]
    with PseudoTerminal(command, TERM="dumb") as terminal:
        terminal.wait_for("supervisor: Serving weft-demo: chat at")
        os.kill(terminal.process.pid, signal.SIGTERM)
        assert terminal.wait() == 0
        assert "\x1b" not in terminal.raw
