"""Chat templates: finds those of a checkpoint, and compiles and renders them with Jinja2 as `transformers` does.

Owns the sandboxed environment, the compiled templates and the names that a template sees. Invariant: for the same
messages the text equals that of `apply_chat_template`. A template is foreign code: it runs in Jinja's immutable
sandbox, and every failure in it is a `ChatTemplateError`. Knows no token ids (see `tokenizer`), nor which text must not
become a control token (see `shield`).

Messages come in one form: content is a string, arguments of calls are objects. Some templates want lists of parts
instead, or arguments as JSON text; some tell a turn of calls alone by its content, which is null. Which of them a
template wants is tried once, with a short chat.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from weft.server.text.tool_variables import with_tools

DEFAULT_NAME = "default"
TOOL_NAME = "tool_use"
"""The names in `transformers` of the templates for plain chats and for chats with tools."""

RESERVED_NAMES = frozenset({"messages", "add_generation_prompt"})
"""Names that callers cannot set as variables, because each has a parameter of its own."""

NO_TEMPLATE = "this model has no chat template: use /v1/completions, or put a chat_template.jinja into its folder"
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """How messages become a prompt.

    Attributes:
        continue_final_message: End with the content of the last message, which is left open.
        variables: What else the template may name, for example tools or enable_thinking.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, object] = field(default_factory=dict)


class ChatTemplateError(Exception):
    """The messages cannot be rendered, or there is no template. The message is fit for the client."""


_PROBE = "pr0be"
_NO_TOKENS = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "")


@dataclass(frozen=True, slots=True)
class MessageForms:
    """The forms in which a template takes messages.

    Attributes:
        takes_parts: It shows content as a list of parts only.
        takes_json: It shows the arguments of calls as JSON text only.
        takes_null: It shows calls only where content is null.
    """

    takes_parts: bool
    takes_json: bool
    takes_null: bool

    def applied(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message in these forms. Without content it is empty: templates read it as text of any turn."""
        if message.get("content") is None:
            message = {**message, "content": None if self.takes_null and message.get("tool_calls") else ""}
        if self.takes_parts and isinstance(message.get("content"), str):
            message = {**message, "content": _parts(message["content"])}
        if self.takes_json and isinstance(message.get("tool_calls"), list):
            message = {**message, "tool_calls": [_with_json(call) for call in message["tool_calls"]]}
        return message


def wanted_forms(template: jinja2.Template) -> MessageForms:
    """Try which forms the template shows; those in which messages come, if it shows them."""
    takes_parts = not _shows(template, [_question(_PROBE)]) and _shows(template, [_question(_parts(_PROBE))])
    tried = [
        MessageForms(takes_parts, takes_json, takes_null)
        for takes_null in (False, True)
        for takes_json in (False, True)
    ]
    call = {"id": "000000000", "type": "function", "function": {"name": "f", "arguments": {"x": _PROBE}}}
    chat = [_question("x"), {"role": "assistant", "content": None, "tool_calls": [call]}]
    return next((forms for forms in tried if _shows(template, [forms.applied(turn) for turn in chat])), tried[0])


def _shows(template: jinja2.Template, messages: list[dict[str, Any]]) -> bool:
    seen = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True}
    try:
        return _PROBE in template.render(_NO_TOKENS, **seen)
    except Exception:  # foreign code raises what it likes
        return False


def _question(content: object) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _with_json(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


class _GenerationTag(Extension):
    """Renders the body of `{% generation %}`, which marks the text of the model for training."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: Parser) -> nodes.Scope:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON without the escapes for HTML of Jinja's own filter, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment


class ChatTemplate:
    """One compiled template. Rendering changes nothing, so threads may share it.

    Attributes:
        source: Its text.
        names: Words by which the template looks up keys and compares values.
        variables: Names that the template uses and does not define.
    """

    def __init__(self, source: str) -> None:
        """Compile a source.

        Raises:
            ChatTemplateError: It is not a valid template; the message names the line.
        """
        try:
            tree = _environment().parse(source)
            self._template = _environment().from_string(tree)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(f"the chat template is invalid at line {error.lineno}: {error.message}") from error
        self.source = source
        self._knows_developer = "developer" in source
        self.names = _names(tree)
        self.variables = frozenset(meta.find_undeclared_variables(tree))

    def render(
        self, messages: Sequence[Mapping[str, object]], add_generation_prompt: bool, variables: Mapping[str, object]
    ) -> str:
        """Return the prompt text.

        Args:
            messages: JSON values, at least a role in each message.
            variables: Other names that the template may use: tools, documents, switches, special tokens.

        Raises:
            ChatTemplateError: The template refuses the messages, or fails.
        """
        seen = {"tools": None, "documents": None, **with_tools(variables, self.variables)}
        seen["messages"] = [self._adapt(message) for message in messages]
        seen["add_generation_prompt"] = add_generation_prompt
        try:
            return self._template.render(seen)
        except Exception as error:  # foreign code raises what it likes
            raise ChatTemplateError(f"the chat template refuses these messages: {error}") from error

    @functools.cached_property
    def _forms(self) -> MessageForms:
        return wanted_forms(self._template)

    def _adapt(self, message: Mapping[str, object]) -> dict[str, object]:
        """Use the template's name of the system role, its forms, and all names of an earlier answer's reasoning.

        Another key without a value is left out, because templates test whether it is there.
        """
        adapted = {name: value for name, value in message.items() if value is not None}
        if adapted.get("role") == "developer" and not self._knows_developer:
            adapted["role"] = "system"
        reasoning = next((adapted[name] for name in _REASONING_NAMES if name in adapted), None)
        if reasoning is not None:
            adapted["reasoning_content"] = reasoning
            for name in _REASONING_NAMES:
                adapted.setdefault(name, reasoning)
        return self._forms.applied(adapted)


def _names(tree: nodes.Template) -> frozenset[str]:
    attributes = {node.attr for node in tree.find_all(nodes.Getattr)}
    constants = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return frozenset(attributes | constants | {"role", *_REASONING_NAMES})


class ChatTemplates:
    """The templates of a checkpoint by name."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        """Compile all of them.

        Raises:
            ChatTemplateError: One is invalid.
        """
        self._named = {name: ChatTemplate(source) for name, source in sources.items()}

    def own(self, has_tools: bool) -> ChatTemplate | None:
        """Return the checkpoint's template, with tools the one that was written for them; None: there is none."""
        template = self._named.get(TOOL_NAME) if has_tools else None
        return template or self._named.get(DEFAULT_NAME)

    def select(self, has_tools: bool) -> ChatTemplate:
        """Return the template for a request, as `own` does.

        Raises:
            ChatTemplateError: There is none.
        """
        if (own := self.own(has_tools)) is not None:
            return own
        if self._named:
            raise ChatTemplateError(f"this model has no default chat template, only {', '.join(sorted(self._named))}")
        raise ChatTemplateError(NO_TEMPLATE)


_TEMPLATE_FILE = "chat_template.jinja"
_TEMPLATE_FOLDERS = ("additional_chat_templates", "chat_templates")
_CONFIG_FILES = ("chat_template.json", "processor_config.json")  # of multimodal checkpoints


def read_chat_templates(folder: Path, config: Mapping[str, object]) -> dict[str, str]:
    """Read name -> source, from files if there are any, else from tokenizer_config.json, else the processor's files.

    Args:
        config: The tokenizer_config.json, whose `chat_template` is a source or a list of {name, template}.

    Returns:
        The sources; none if the checkpoint has no template.

    Raises:
        ChatTemplateError: A file of the processor is not JSON, or a template has no name or no source.
    """
    files = [(DEFAULT_NAME, folder / _TEMPLATE_FILE)] if (folder / _TEMPLATE_FILE).is_file() else []
    files += [(file.stem, file) for name in _TEMPLATE_FOLDERS for file in sorted((folder / name).glob("*.jinja"))]
    if files:
        return {name: file.read_text(encoding="utf-8") for name, file in files}
    declared = config.get("chat_template")
    for file in (folder / name for name in _CONFIG_FILES):
        if declared is None and file.is_file():
            declared = _declared_in(file)
    if isinstance(declared, str):
        return {DEFAULT_NAME: declared}
    if isinstance(declared, list):
        try:
            return {str(entry["name"]): str(entry["template"]) for entry in declared}
        except (KeyError, TypeError):
            raise ChatTemplateError("chat_template: every template of a list must have a name and a template") from None
    return dict(declared) if isinstance(declared, dict) else {}


def _declared_in(file: Path) -> object:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ChatTemplateError(f"{file.name} is not valid JSON: {error}") from error
    return content.get("chat_template") if isinstance(content, dict) else None
