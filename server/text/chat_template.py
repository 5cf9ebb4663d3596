"""Chat templates: compiles and renders them with Jinja2 as `transformers` does.

Owns the sandboxed environment, the compiled templates and the names that a template sees. Invariant: for the same
messages the text equals that of `apply_chat_template`. A template is foreign code: it runs in Jinja's immutable
sandbox, and every failure in it is a `ChatTemplateError`. Knows no token ids (see `tokenizer`), nor which text must not
become a control token (see `shield`).
"""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from weft.server.text.template_forms import MessageForms, wanted_forms

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
        seen = {"tools": None, "documents": None, **variables}
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
        """Use the template's name of the system role, its forms, and both names of an earlier answer's reasoning.

        Another key without a value is left out, because templates test whether it is there.
        """
        adapted = {name: value for name, value in message.items() if value is not None}
        if adapted.get("role") == "developer" and not self._knows_developer:
            adapted["role"] = "system"
        reasoning = next((adapted[name] for name in _REASONING_NAMES if name in adapted), None)
        if reasoning is not None:
            adapted["reasoning_content"] = reasoning
            adapted.setdefault("thinking", reasoning)
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
