"""The conversation of `weft chat`: its messages, and the slash commands that change it.

Prints nothing, and asks the server for nothing but its list of models.
"""

import json
import pathlib
from collections.abc import Callable
from dataclasses import dataclass, field

from weft.server.cli.chat_client import ChatClient, ChatError
from weft.server.text.shield import strip_controls


class CommandError(Exception):
    """A command failed; the message says why."""


class AskAgain(Exception):
    """It was /retry: what was asked last, whose message this is, is no longer in the conversation."""


@dataclass(slots=True)
class Conversation:
    """The messages so far and the settings of the next request. Only commands and `chat` change it.

    Attributes:
        options: Further fields of each request, such as temperature.
        messages: Of user and assistant in turns, without the system prompt.
        saved: Files that this conversation has written and may overwrite.
        asked: What the user said last; empty if nothing.
        num_before: How many messages there were then.
    """

    client: ChatClient
    model: str
    system: str = ""
    options: dict[str, object] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(default_factory=list)
    saved: set[pathlib.Path] = field(default_factory=set)
    asked: str = ""
    num_before: int = 0

    def all_messages(self) -> list[dict[str, str]]:
        """The messages of a request, the system prompt first."""
        return ([{"role": "system", "content": self.system}] if self.system else []) + self.messages

    def body(self) -> dict[str, object]:
        """The body of the request for the next answer."""
        return {"model": self.model, "messages": self.all_messages(), **self.options}


def run_command(conversation: Conversation, line: str) -> str:
    """Run a line that begins with a slash. Returns the text to show.

    Raises:
        CommandError: There is no such command, or it fails.
        AskAgain: It was /retry.
        EOFError: It was /quit.
    """
    name, _, argument = line.strip().partition(" ")
    if name not in _COMMANDS:
        raise CommandError(f"no such command: {name} (/help lists them; a message may begin with a space)")
    return _COMMANDS[name](conversation, argument.strip())


def _system(conversation: Conversation, text: str) -> str:
    if not text:
        return strip_controls(conversation.system) or "no system prompt"
    conversation.system = "" if text == "-" else text
    return "system prompt set" if conversation.system else "system prompt removed"


def _model(conversation: Conversation, name: str) -> str:
    try:
        names = conversation.client.models()
    except ChatError as error:
        if not name:
            raise CommandError(str(error)) from None
        names = [name]  # a server need not list its models
    if not name:
        return "\n".join(f"{'*' if known == conversation.model else ' '} {known}" for known in names)
    if name not in names:
        raise CommandError(f"no such model: {name} (the server has {', '.join(names)})")
    conversation.model = name
    return f"{name} answers from here on"


def _set(conversation: Conversation, text: str) -> str:
    name, _, value = text.partition(" ")
    if not name:
        shown = (f"{name} {json.dumps(value, ensure_ascii=False)}" for name, value in conversation.options.items())
        return "\n".join(shown) or "nothing is set: the server decides"
    if name in _OF_CHAT:
        raise CommandError(f"{name} is what weft chat itself sends")
    if command := _COMMANDS.get(f"/{name}") if name in ("system", "model") else None:
        return command(conversation, value.strip())
    if not value.strip():
        raise CommandError(f"/set {name} needs a value, such as /set temperature 0.7; - leaves it to the server")
    if value.strip() == "-":
        conversation.options.pop(name, None)
        return f"the server decides on {name}"
    try:
        conversation.options[name] = json.loads(value)
    except ValueError:
        conversation.options[name] = value.strip()
    return f"{name} set"


def _retry(conversation: Conversation, _: str) -> str:
    if not conversation.asked:
        raise CommandError("nothing has been asked yet")
    del conversation.messages[conversation.num_before :]
    raise AskAgain(conversation.asked)


def _clear(conversation: Conversation, _: str) -> str:
    conversation.messages.clear()
    return "conversation forgotten" + (", the system prompt stays" if conversation.system else "")


def _save(conversation: Conversation, name: str) -> str:
    if not name:
        raise CommandError("/save needs a file, such as chat.json or chat.md")
    path = pathlib.Path(name).expanduser().absolute()
    messages = conversation.all_messages()
    if path.suffix == ".md":
        text = "\n\n".join(f"## {message['role']}\n\n{message['content']}" for message in messages)
    else:
        text = json.dumps(messages, indent=2, ensure_ascii=False)
    try:
        with path.open("w" if path in conversation.saved else "x", encoding="utf-8") as file:
            file.write(f"{text}\n")
    except OSError as error:
        raise CommandError(f"cannot write {path}: {(error.strerror or str(error)).lower()}") from None
    conversation.saved.add(path)
    return f"{len(messages)} messages saved to {path}"


def _quit(_: Conversation, __: str) -> str:
    raise EOFError


_COMMANDS: dict[str, Callable[[Conversation, str], str]] = {
    "/system": _system,
    "/model": _model,
    "/set": _set,
    "/retry": _retry,
    "/clear": _clear,
    "/save": _save,
    "/help": lambda *_: HELP,
    "/quit": _quit,
    "/bye": _quit,
}
_OF_CHAT = ("messages", "stream", "stream_options")

HELP = '''\
/system TEXT    set the system prompt; alone it is shown, /system - removes it
/model NAME     let another model answer; alone it lists them
/set NAME VALUE set a field of the next requests, such as temperature 0.7 or max_tokens 100; alone they are shown,
                /set NAME - leaves one to the server again
/retry          ask the last message again
/clear          forget the conversation
/save FILE      write the messages as JSON, or as Markdown if FILE ends in .md
/quit           leave, as /bye and Ctrl-D do

A line that ends in \\ goes on in the next one; """ begins and ends a block of lines.
Ctrl-C stops an answer and keeps what has come. The arrow keys bring back what was typed, Ctrl-R searches it.'''
