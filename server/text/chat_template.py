"""Chat templates: compiles and renders them with Jinja2 as `transformers` does.

Owns the sandboxed environment, the compiled templates and the names that a template sees. Invariant: for the same
messages the text equals that of `apply_chat_template`. A template is foreign code: it runs in a sandbox within limits
(see `template_sandbox`), and every failure in it is a `ChatTemplateError`. Knows no token ids (see `tokenizer`), nor
which text must not become a control token (see `shield`).

Messages reach the template in the forms that it takes (see `template_forms`). Where it refuses them, or leaves out what
they say, they are said in another way (see `conversation_repairs`), and the log tells it once. No prompt is silently
poorer than its messages.
"""

import copy
import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.server.text.conversation_repairs import shows_all, tools_told, ways
from weft.server.text.template_files import DEFAULT_NAME, TemplateFileError, read_chat_templates, read_text
from weft.server.text.template_forms import MessageForms, completed, wanted_forms, with_tools
from weft.server.text.template_sandbox import LIST_CHANGES, TemplateLimitError, TemplateSourceError, compiled, limits

logger = logging.getLogger(__name__)

TOOL_NAME = "tool_use"
"""The name in `transformers` of the template for chats with tools."""

RESERVED_NAMES = frozenset({"messages", "add_generation_prompt"})
"""Names that callers cannot set as variables, because each has a parameter of its own."""

NO_TEMPLATE = "this model has no chat template: use /v1/completions, or name one with --chat-template"
BROKEN = "use /v1/completions, or name another template with --chat-template"
"""What to do where a template is no use."""
_MAX_TOLD = 64
_MAX_FAULT_CHARS = 1000
"""Of what a template says of messages."""
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """How messages become a prompt.

    Attributes:
        continue_final_message: End with the content of the last message, which is left open.
        repairs: Say messages in another way where the template refuses them or leaves out what they say.
        variables: What else the template may name, for example tools or enable_thinking.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    repairs: bool = True
    variables: Mapping[str, object] = field(default_factory=dict)


class ChatTemplateError(Exception):
    """The messages cannot be rendered, or there is no template. The message is fit for the client."""


class _TooMuchError(ChatTemplateError):
    """The template is beyond its limits, whatever is said in whichever way."""


class ChatTemplate:
    """One compiled template. Rendering changes only what the log was told, so threads may share it.

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
            self._template, names, self.variables = compiled(source)
        except TemplateSourceError as error:
            raise ChatTemplateError(f"the chat template is invalid{error}") from error
        self._changes_lists = not LIST_CHANGES.isdisjoint(names)
        self.names = names | {"role", *_REASONING_NAMES}
        self.source = source
        self._told: set[str] = set()
        self._fault: str | None = None  # why it is not used
        self._knows_developer = "developer" in source

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool,
        variables: Mapping[str, object],
        *,
        repairs: bool = True,
    ) -> str:
        """Return the prompt text.

        Args:
            messages: JSON values, at least a role in each message.
            variables: Other names that the template may use: tools, documents, switches, special tokens.
            repairs: Say the messages in another way where the template refuses them or leaves out what they say.

        Raises:
            ChatTemplateError: The template refuses the messages, or fails; what it said of the messages as they are.
        """
        with limits():
            return self._render_all(messages, add_generation_prompt, variables, repairs)

    def _render_all(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool,
        variables: Mapping[str, object],
        repairs: bool,
    ) -> str:
        given, forms = with_tools(variables, self.variables), self._known_forms()
        seen = {"documents": None, **given, "add_generation_prompt": add_generation_prompt}
        seen |= {} if given.get("tools") else forms.no_tools
        adapted = [self._adapt(message) for message in messages]
        if repairs and isinstance(tools := given.get("tools"), list) and tools and not self.shows_tools:
            adapted = tools_told(adapted, tools)
            self._tell("the chat template shows no tools; they are in the system message")
        prompt, refused = self._tried(adapted, seen)
        if refused is not None:
            seen = completed(seen)
            prompt, _ = self._tried(adapted, seen)
        if prompt is not None and (not repairs or shows_all(prompt, adapted)):
            return prompt
        if repairs:
            prompt = self._repaired(adapted, seen, prompt, refused)
        if prompt is None:
            assert refused is not None
            raise refused
        return prompt

    def _tried(
        self, messages: list[dict[str, Any]], seen: Mapping[str, object]
    ) -> tuple[str | None, ChatTemplateError | None]:
        """The prompt, or why the template refuses it."""
        try:
            return self._render(messages, seen), None
        except _TooMuchError:
            raise
        except ChatTemplateError as error:
            return None, error

    def _render(self, messages: list[dict[str, Any]], seen: Mapping[str, object]) -> str:
        shown = [self._known_forms().applied(message) for message in messages]
        if self._changes_lists:  # it may change what others hold
            shown, seen = copy.deepcopy((shown, dict(seen)))
        try:
            return self._template.render(seen, messages=shown)
        except TemplateLimitError as error:
            raise _TooMuchError(f"the chat template cannot render these messages: {error}") from error
        except MemoryError as error:
            raise _TooMuchError("the chat template cannot render these messages: it takes too much memory") from error
        except Exception as error:  # foreign code raises what it likes
            fault = str(error)[:_MAX_FAULT_CHARS]
            raise ChatTemplateError(f"the chat template refuses these messages: {fault}") from error

    def _repaired(
        self,
        messages: list[dict[str, Any]],
        seen: Mapping[str, object],
        prompt: str | None,
        refused: ChatTemplateError | None,
    ) -> str | None:
        """The first prompt that shows everything, else the first of all; None: the template refuses every way."""
        why = str(refused) if refused else "the chat template leaves out a part of these messages"
        for done, repaired in ways(messages):
            try:
                tried = self._render(repaired, seen)
            except ChatTemplateError:
                continue
            if shows_all(tried, repaired):
                self._tell(f"{why}; {done}")
                return tried
            prompt = tried if prompt is None else prompt
        if prompt is not None:
            self._tell(f"{why}; the prompt does not show everything")
        return prompt

    def _tell(self, what: str) -> None:
        if what not in self._told and len(self._told) < _MAX_TOLD:
            self._told.add(what)
            logger.warning("%s. This is said once", what)

    def _known_forms(self) -> MessageForms:
        """The forms of messages; raises ChatTemplateError for a template that two short ones are too much for."""
        if self._fault is None:
            try:
                return self._forms
            except TemplateLimitError as error:
                self._fault = f"the chat template is not used: {error} to render two short messages"
                logger.warning("%s", self._fault)
        raise _TooMuchError(f"{self._fault}: {BROKEN}")

    @property
    def shows_tools(self) -> bool:
        """Whether it shows tools by itself; else they are in the system message."""
        return self._known_forms().shows_tools

    @functools.cached_property
    def _forms(self) -> MessageForms:
        return wanted_forms(self._template, self.variables)

    def _adapt(self, message: Mapping[str, object]) -> dict[str, object]:
        """Use the template's name of the system role, and all names of an earlier answer's reasoning.

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
        return adapted


class ChatTemplates:
    """The templates of a checkpoint by name. One that is invalid stops nobody but those who chat with it."""

    def __init__(self, sources: Mapping[str, str], fault: str | None = None) -> None:
        """Compile all of them.

        Args:
            fault: Why the sources could not be read.
        """
        self._named: dict[str, ChatTemplate] = {}
        self._faults: dict[str, str] = {} if fault is None else {DEFAULT_NAME: fault}
        for name, source in sources.items():
            try:
                self._named[name] = ChatTemplate(source)
            except ChatTemplateError as error:
                self._faults[name] = str(error)

    @classmethod
    def load(cls, folder: Path, config: Mapping[str, object], file: Path | None = None) -> "ChatTemplates":
        """Read and compile those of a checkpoint (see `read_chat_templates`), or a file in their place."""
        try:
            sources = {DEFAULT_NAME: read_text(file)} if file else read_chat_templates(folder, config)
        except TemplateFileError as error:
            return cls({}, str(error))
        return cls(sources)

    @property
    def faults(self) -> list[str]:
        """What is wrong with those that cannot be used."""
        return list(self._faults.values())

    def own(self, has_tools: bool) -> ChatTemplate | None:
        """Return the checkpoint's template, with tools the one that was written for them; None: there is none."""
        template = self._named.get(TOOL_NAME) if has_tools else None
        return template or self._named.get(DEFAULT_NAME)

    def select(self, has_tools: bool) -> ChatTemplate:
        """Return the template for a request, as `own` does.

        Raises:
            ChatTemplateError: There is none, or it is invalid.
        """
        if (own := self.own(has_tools)) is not None:
            return own
        if self._faults:
            raise ChatTemplateError(f"{self.faults[0]}: {BROKEN}")
        if self._named:
            raise ChatTemplateError(f"this model has no default chat template, only {', '.join(sorted(self._named))}")
        raise ChatTemplateError(NO_TEMPLATE)
