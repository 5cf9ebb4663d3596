"""`weft chat`: a conversation with a server in the terminal; with standard input from elsewhere, one answer.

Owns the loop of question and answer, what Ctrl-C and Ctrl-D mean, and the exit codes: 0, 1 when a single answer fails,
130 when it is interrupted.
"""

import contextlib
import os
import sys
import time
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from weft.server.terminal.answer_display import LiveDisplay, PlainDisplay
from weft.server.terminal.chat_client import ChatClient, ChatError
from weft.server.terminal.conversation import CommandError, Conversation, run_command
from weft.server.terminal.line_input import LineInput, history_path

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
_ERROR = "bold red"


def chat(url: str, api_key: str | None, model: str | None, system: str | None, options: dict[str, object]) -> int:
    """Talk until the user leaves, or answer what standard input holds; returns the exit code.

    Without a model the first answers that the server lists; options are further fields of each request.
    """
    console = Console(highlight=False)
    try:
        client = ChatClient(url, api_key)
        conversation = Conversation(client, model or _first_model(client), system or "", options)
        if sys.stdin.isatty():
            _converse(conversation, console)
        else:
            _answer_input(conversation, console)
    except ChatError as error:
        print(f"weft: error: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # such as `weft chat | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    return 0


def _first_model(client: ChatClient) -> str:
    names = client.models()
    if not names:
        raise ChatError(f"{client.url} lists no model (--model names one)")
    return names[0]


def _answer_input(conversation: Conversation, console: Console) -> None:
    """Answer all of standard input, once."""
    message = sys.stdin.buffer.read().decode("utf-8", "replace").strip()
    if not message:
        raise ChatError("standard input holds no message")
    conversation.messages.append({"role": "user", "content": message})
    answer = _Answer()
    answer.receive(conversation, _display(console))
    if answer.fault is not None:
        raise answer.fault
    if answer.is_interrupted:
        raise KeyboardInterrupt


def _converse(conversation: Conversation, console: Console) -> None:
    """Question and answer in turns until Ctrl-D."""
    keyboard = LineInput(history_path())
    note = f"{conversation.model} at {conversation.client.url}; /help lists commands, Ctrl-D leaves"
    console.print(Text(note, style="dim"))
    while True:
        try:
            line = keyboard.read("> ")
            if line.startswith("/"):
                console.print(Text(run_command(conversation, line)))
            elif line.strip():
                _take_turn(conversation, line.strip(), console)
        except CommandError as error:
            console.print(Text(str(error), style=_ERROR))
        except KeyboardInterrupt:
            console.print()
        except EOFError:
            console.print()
            return


def _take_turn(conversation: Conversation, message: str, console: Console) -> None:
    """Send a message and show the answer. What came of it is kept; a message that got nothing is taken back."""
    conversation.messages.append({"role": "user", "content": message})
    answer = _Answer()
    answer.receive(conversation, _display(console))
    if answer.content:
        conversation.messages.append({"role": "assistant", "content": answer.content})
    else:
        conversation.messages.pop()
    if answer.fault is not None:
        console.print(Text(str(answer.fault), style=_ERROR))
    if answer.fault is None or answer.num_deltas:
        console.print(Text(answer.summary(), style="dim"))


def _display(console: Console) -> LiveDisplay | PlainDisplay:
    return LiveDisplay(console) if console.is_terminal and not console.is_dumb_terminal else PlainDisplay()


@dataclass(slots=True)
class _Answer:
    """What came, and when.

    Attributes:
        num_tokens: What the server counted; None: it has not said, and num_deltas is about as many.
        first_s, last_s: Seconds from the request to the first and the last delta.
    """

    content: str = ""
    finish_reason: str | None = None
    is_interrupted: bool = False
    fault: ChatError | None = None
    num_tokens: int | None = None
    num_deltas: int = 0
    first_s: float = 0.0
    last_s: float = 0.0

    def receive(self, conversation: Conversation, display: LiveDisplay | PlainDisplay) -> None:
        """Ask, and show until the end, Ctrl-C or a fault."""
        start_time = time.monotonic()
        try:
            with contextlib.closing(conversation.client.stream(conversation.body())) as deltas:
                for delta in deltas:
                    if delta.reasoning or delta.content:
                        self.last_s = time.monotonic() - start_time
                        self.first_s = self.first_s or self.last_s
                        self.num_deltas += 1
                        self.content += delta.content
                        if delta.reasoning:
                            display.add(delta.reasoning, is_reasoning=True)
                        if delta.content:
                            display.add(delta.content)
                    self.num_tokens = delta.num_tokens if delta.num_tokens is not None else self.num_tokens
                    self.finish_reason = delta.finish_reason or self.finish_reason
        except ChatError as error:
            self.fault = error
        except KeyboardInterrupt:
            self.is_interrupted = True
        finally:
            display.close()

    def summary(self) -> str:
        """Tokens, their rate and the time to the first one; and why the answer ended, if not by itself."""
        number = self.num_deltas if self.num_tokens is None else self.num_tokens
        parts = [f"{'about ' if self.num_tokens is None else ''}{number} token{'' if number == 1 else 's'}"]
        if number > 1 and self.last_s > self.first_s:
            parts.append(f"{(number - 1) / (self.last_s - self.first_s):.1f} tokens/s")
        if number:
            parts.append(f"first after {self.first_s:.2f} s")
        if self.finish_reason == "length":
            parts.append("cut at the token limit")
        if self.is_interrupted:
            parts.append("stopped")
        return ", ".join(parts)
