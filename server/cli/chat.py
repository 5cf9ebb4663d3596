"""`weft chat`: a conversation with a server in the terminal, or one answer to a prompt or to standard input.

Owns the loop of question and answer, the meaning of Ctrl-C and Ctrl-D, and the exit codes: 0; 1 if a single answer
fails; 130 if it is interrupted.
"""

import contextlib
import os
import sys
import time
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from weft.server.cli.chat_client import ChatClient, ChatError
from weft.server.cli.conversation import AskAgain, CommandError, Conversation, run_command
from weft.server.cli.display import LineInput, LiveDisplay, PlainDisplay, history_path

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
_ERROR = "bold red"


def chat(
    url: str, api_key: str | None, model: str | None, system: str | None, options: dict[str, object], prompt: str | None
) -> int:
    """Talk until the user leaves, or answer the prompt and the text on standard input. Returns the exit code.

    Without `model` the first one that the server lists answers. `options` are further fields of each request.
    """
    console = Console(highlight=False)
    try:
        client = ChatClient(url, api_key)
        conversation = Conversation(client, model or _first_model(client), system or "", options)
        if sys.stdin.isatty() and prompt is None:
            _converse(conversation, console)
        else:
            _answer_once(conversation, console, prompt or "")
    except ChatError as error:
        print(f"weft: error: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # for example `weft chat | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    return 0


def _first_model(client: ChatClient) -> str:
    names = client.models()
    if not names:
        raise ChatError(f"{client.url} lists no model (--model names one)")
    return names[0]


def _answer_once(conversation: Conversation, console: Console, prompt: str) -> None:
    """Answer the prompt, and below it what a pipe brings, as one message."""
    piped = "" if sys.stdin.isatty() else sys.stdin.buffer.read().decode("utf-8", "replace")
    message = f"{prompt}\n\n{piped}".strip()
    if not message:
        raise ChatError("standard input holds no message")
    answer = _ask(conversation, message, console)
    if answer.fault is not None:
        raise answer.fault
    if answer.is_interrupted:
        raise KeyboardInterrupt


def _converse(conversation: Conversation, console: Console) -> None:
    """Read messages and show answers until Ctrl-D."""
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
        except AskAgain as again:
            _take_turn(conversation, str(again), console)
        except CommandError as error:
            console.print(Text(str(error), style=_ERROR))
        except KeyboardInterrupt:
            console.print()
        except EOFError:
            console.print()
            return


def _take_turn(conversation: Conversation, message: str, console: Console) -> None:
    """Send a message and show the answer. A message without any answer is dropped from the conversation."""
    answer = _ask(conversation, message, console)
    if answer.content:
        conversation.messages.append({"role": "assistant", "content": answer.content})
    else:
        conversation.messages.pop()
    if answer.fault is not None:
        console.print(Text(str(answer.fault), style=_ERROR))
    if answer.fault is None or answer.num_deltas:
        console.print(Text(answer.summary(), style="dim"))


def _ask(conversation: Conversation, message: str, console: Console) -> "_ReceivedAnswer":
    """Append a message to the conversation, and receive and show the answer."""
    conversation.asked, conversation.num_before = message, len(conversation.messages)
    conversation.messages.append({"role": "user", "content": message})
    can_redraw = console.is_terminal and not console.is_dumb_terminal
    answer = _ReceivedAnswer()
    answer.receive(conversation, LiveDisplay(console) if can_redraw else PlainDisplay())
    return answer


@dataclass(slots=True)
class _ReceivedAnswer:
    """The text that arrived, and when.

    Attributes:
        num_tokens: As the server counted them; None: it did not tell, and num_deltas is an estimate.
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
        """Send the request, and show the answer until its end, Ctrl-C or a fault."""
        start_time = time.monotonic()
        try:
            with contextlib.closing(conversation.client.stream(conversation.body())) as deltas:
                for delta in deltas:
                    if delta.reasoning or delta.content:
                        self.last_s = time.monotonic() - start_time
                        self.first_s = self.first_s or self.last_s
                        self.num_deltas += 1
                        self.content += delta.content
                        for text, is_reasoning in ((delta.reasoning, True), (delta.content, False)):
                            if text:
                                display.add(text, is_reasoning=is_reasoning)
                    self.num_tokens = delta.num_tokens if delta.num_tokens is not None else self.num_tokens
                    self.finish_reason = delta.finish_reason or self.finish_reason
        except ChatError as error:
            self.fault = error
        except KeyboardInterrupt:
            self.is_interrupted = True
        finally:
            display.close()

    def summary(self) -> str:
        """Tokens, tokens per second, time to the first one, and why the answer ended early."""
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
