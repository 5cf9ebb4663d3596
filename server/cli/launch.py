"""`weft launch`: tells what a coding agent needs to work with a server, as lines for a shell, or starts it so.

An agent is a function from the server's facts to variables and a command line; nothing is written to its files. The key
is never printed: the lines name the variable that holds it.
"""

import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from weft.server.cli.chat_client import ChatClient, ChatError
from weft.server.text.shield import strip_controls

_FAILED = 1
_KEY = "OPENAI_API_KEY"
_NO_KEY = "none"
_LEAST_CONTEXT = 20_000
"""Tokens below which an agent's instructions and tools leave no room for work."""


@dataclass(frozen=True, slots=True)
class _Server:
    """What agents must know. `context` is None while the server does not tell it; `url` ends before /v1."""

    url: str
    model: str
    context: int | None
    key: str


@dataclass(frozen=True, slots=True)
class _Start:
    """How an agent is started."""

    variables: Mapping[str, str]
    command: Sequence[str]


def _claude(server: _Server) -> _Start:
    variables = {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_AUTH_TOKEN": server.key,
        "ANTHROPIC_MODEL": server.model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": server.model,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    if server.context is not None and server.context < _CLAUDES_CONTEXT:
        window = max(server.context, _CLAUDES_LEAST_WINDOW)
        variables["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] = str(window)
        variables["CLAUDE_AUTOCOMPACT_PCT_OVERRIDE"] = str(max(1, 75 * server.context // window))
    return _Start(variables, ["claude"])


_CLAUDES_CONTEXT, _CLAUDES_LEAST_WINDOW = 200_000, 100_000
"""Tokens for which Claude Code takes every model's context, and the least that it can be told."""


def _codex(server: _Server) -> _Start:
    has_key = server.key != _NO_KEY
    settings = {
        "model": server.model,
        "model_context_window": server.context,
        "model_provider": "weft",
        "model_providers.weft.name": "weft",
        "model_providers.weft.base_url": f"{server.url}/v1",
        "model_providers.weft.wire_api": "responses",
        "model_providers.weft.env_key": _KEY if has_key else None,
    }
    flags = [f"{name}={json.dumps(value)}" for name, value in settings.items() if value is not None]
    command = ["codex", *(part for flag in flags for part in ("-c", flag))]
    return _Start({_KEY: server.key} if has_key else {}, command)


def _opencode(server: _Server) -> _Start:
    model: dict[str, object] = {"name": server.model, "tool_call": True}
    if server.context is not None:
        model["limit"] = {"context": server.context, "output": min(4096, server.context // 4)}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "weft",
        "options": {"baseURL": f"{server.url}/v1", "apiKey": f"{{env:{_KEY}}}"},
        "models": {server.model: model},
    }
    chosen = f"weft/{server.model}"
    config = {"provider": {"weft": provider}, "model": chosen, "small_model": chosen}
    return _Start({_KEY: server.key, "OPENCODE_CONFIG_CONTENT": json.dumps(config)}, ["opencode"])


def _qwen(server: _Server) -> _Start:
    variables = {"OPENAI_BASE_URL": f"{server.url}/v1", _KEY: server.key, "OPENAI_MODEL": server.model}
    return _Start(variables, ["qwen", "--auth-type", "openai"])


def _aider(server: _Server) -> _Start:
    variables = {"OPENAI_API_BASE": f"{server.url}/v1", _KEY: server.key}
    flags = ["--model", f"openai/{server.model}", "--edit-format", "diff", "--no-show-model-warnings"]
    return _Start(variables, ["aider", *flags])


AGENTS: Mapping[str, tuple[Callable[[_Server], _Start], str]] = {
    "claude": (_claude, "npm install -g @anthropic-ai/claude-code"),
    "codex": (_codex, "npm install -g @openai/codex"),
    "opencode": (_opencode, "npm install -g opencode-ai"),
    "qwen": (_qwen, "npm install -g @qwen-code/qwen-code"),
    "aider": (_aider, "pip install aider-chat"),
}
"""How each agent is started, and how it is installed."""


def launch(
    agent: str, url: str, api_key: str | None, model: str | None, arguments: Sequence[str], *, runs: bool
) -> int:
    """Print how to start an agent, or start it in place of this process. Returns the exit code.

    Without `model` the first one that the server lists is used. `arguments` are further ones of the agent.
    """
    describe, install = AGENTS[agent]
    try:
        server = _ask(url, api_key, model)
    except ChatError as error:
        print(f"weft: error: {error}", file=sys.stderr)
        return _FAILED
    if server.context is not None and server.context < _LEAST_CONTEXT:
        told = f"{server.model} has a context of {server.context} tokens, and most agents begin with 7,000 to 19,000"
        print(f"weft: warning: {told}", file=sys.stderr)
    start = describe(server)
    command = [*start.command, *arguments]
    if not runs:
        for name, value in start.variables.items():
            shown = f'"${_KEY}"' if value == api_key else shlex.quote(value)
            if shown != f'"${name}"':
                print(f"export {name}={shown}")
        print(shlex.join(command))
        return 0
    program = shutil.which(command[0])
    if program is None:
        print(f"weft: error: {agent} is not installed: {install}", file=sys.stderr)
        return _FAILED
    os.execve(program, command, {**os.environ, **start.variables})


def _ask(url: str, api_key: str | None, model: str | None) -> _Server:
    """Raises ChatError if the server cannot be reached, or does not have the model."""
    client = ChatClient(url, api_key)
    contexts = {strip_controls(str(card.get("id"))): card.get("max_model_len") for card in client.cards()}
    if model is None:
        model = next(iter(contexts), "")
    if model not in contexts:
        raise ChatError(f"no such model: {model} ({client.url} has {', '.join(contexts) or 'none'})")
    context = contexts[model]
    known = context if isinstance(context, int) else None
    return _Server(client.url.removesuffix("/v1"), model, known, api_key or _NO_KEY)
