"""`weft pull`, `list`, `rm`, `show` and `run`: what they print of the library, and a server for one conversation."""

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time

from weft.engine.families.registry import identify, own_task
from weft.engine.wire.errors import ModelError
from weft.engine.wire.machine import format_size
from weft.server.cli.reports import show_plan
from weft.server.cli.tables import align
from weft.server.formats.detection import choose_formats, renderer
from weft.server.library import library
from weft.server.library.contents import facts_of
from weft.server.library.download import LibraryError
from weft.server.library.library import shown_progress
from weft.server.library.names import known_models, parse
from weft.server.settings import Settings, StartError
from weft.server.supervise import checkpoint
from weft.server.supervise.spawn import die_with_parent, python_command
from weft.server.text.chat_template import NO_TEMPLATE
from weft.server.text.tokenizer import Tokenizer, TokenizerError

_LOOK_S = 0.1
_END_S = 15.0


def pull(name: str) -> None:
    """`weft pull NAME`: fetch a model, or a newer version of it."""
    with shown_progress(lambda line: print(line, file=sys.stderr)) as report:
        checkpoint.resolve(name, refresh=True, report=report)
    print(f"{name} is here: `weft run` talks to it, `weft serve` serves it")


def show_known() -> None:
    """`weft pull` alone: the models with short names, those that fit this machine first."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    here = {entry.name for entry in library.entries()}
    rows = [("name", "use", "download", "memory", "context", "licence", "")]
    for known in sorted(known_models(), key=lambda known: (known.memory_bytes > free, known.memory_bytes)):
        sizes = (format_size(known.file_bytes), f"about {format_size(known.memory_bytes)}", f"{known.context:,}")
        note = "too large here" if known.memory_bytes > free else "in the library" if known.name in here else ""
        rows.append((known.name, known.use, *sizes, known.licence, note))
    print(align(rows))
    print(f"\nThis machine has {format_size(free)} of memory. Any model of the hub can be named, too: org/model, or")
    print("org/model-GGUF:Q4_K_M for a file of several; and the address of a GGUF file.")


def show_list() -> None:
    """`weft list`: the models of the library."""
    rows = [("name", "size", "format", "type", "fetched")]
    for entry in library.entries():
        facts, day = entry.facts, time.strftime("%Y-%m-%d", time.localtime(entry.facts.modified))
        rows.append((entry.name, format_size(facts.size_bytes), facts.format, facts.quantization, day))
    print(align(rows) if rows[1:] else "the library is empty; `weft pull` lists what could be in it")


def check_is_here(name: str) -> None:
    """Raise LibraryError if a model is not on this disk."""
    if library.find(parse(name)) is None:
        raise LibraryError(f"{name} is not in the library: `weft pull {name}` fetches it")


def show(settings: Settings) -> int:
    """`weft show`: what a model is and can do, and what `weft plan` says of it. Returns the exit code.

    Args:
        settings: As for `reports.show_plan`.

    Raises:
        StartError: Its files cannot be read.
    """
    folder, facts = pathlib.Path(settings.model or ""), facts_of(pathlib.Path(settings.model or ""))
    template_file = pathlib.Path(settings.chat_template) if settings.chat_template else None
    try:
        fields, task = identify(folder).fields, own_task(folder)
        tokenizer = Tokenizer.load(folder, template_file)
    except (ModelError, TokenizerError) as error:
        raise StartError(str(error)) from None
    kind = f"{facts.format}, {facts.quantization}" if facts.quantization else facts.format
    rows = [
        ("name", settings.served_model_name[0]),
        ("files", f"{kind}, {format_size(facts.size_bytes)}"),
        ("task", task),
        ("context", f"{fields.optional_integer('max_position_embeddings') or 0:,} tokens"),
    ]
    if task == "generate":
        template = tokenizer.template_source(has_tools=True)
        formats = choose_formats(template, settings.tool_format, tokenizer.added_id, renderer(tokenizer))
        lacking = (
            "the last message is what the encoder reads" if fields.flag("is_encoder_decoder", False) else NO_TEMPLATE
        )
        rows.append(("chat", "the template of the model" if template else lacking))
        rows.append(("tools", formats.tools.name if formats.tools else formats.no_tools))
        rows.append(("reasoning", formats.reasoning.name if formats.reasoning else "none"))
    print(align([(f"{label:<11}", text) for label, text in rows]), flush=True)
    return show_plan(settings)


def run(settings: Settings, name: str, prompt: str | None) -> int:
    """`weft run`: serve a model on a free port, talk to it, and end it. Returns the exit code.

    Args:
        settings: As the server will have them, with its folder as model.
        prompt: The only message; None: a conversation, or standard input.

    Raises:
        StartError: One cannot talk to the model.
    """
    template = pathlib.Path(settings.chat_template) if settings.chat_template else None
    folder = pathlib.Path(settings.model or "")
    if NO_TEMPLATE in checkpoint.check_tokenizer(folder, settings.task, template):
        raise StartError(f"{name}: {NO_TEMPLATE} (WEFT_CHAT_TEMPLATE)")
    if settings.task == "auto" and own_task(folder) != "generate":
        raise StartError(f"{name} is no model to talk to: `weft serve {name}` serves its vectors")
    from weft.server.cli.chat import chat

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = python_command("weft.server", "serve", name, "--host", "127.0.0.1", "--port", str(port))
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C stops an answer, not the server
            preexec_fn=lambda: die_with_parent(signal.SIGTERM),
        )
        try:
            if not _is_ready(server, f"http://127.0.0.1:{port}/ready"):
                log.seek(0)
                said = log.read().decode("utf-8", "replace").strip()
                print(said or f"weft: error: the server ended with {server.returncode}", file=sys.stderr)
                return 2
            key = next(iter(settings.api_key), None)
            return chat(f"http://127.0.0.1:{port}", key, None, None, {}, prompt)
        finally:
            server.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(_END_S)


def _is_ready(server: "subprocess.Popen[bytes]", url: str) -> bool:
    """Wait until a server answers; False if it ends before."""
    import httpx

    with httpx.Client(trust_env=False) as client:
        while server.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                if client.get(url).status_code == 200:
                    return True
            time.sleep(_LOOK_S)
    return False
