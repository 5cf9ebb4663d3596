"""Chat templates: has them compiled and rendered, knows which one is for a chat, and says what is wrong with them.

A template is foreign code, so another process runs it (see `template_process`), and every failure in it is a
`ChatTemplateError`. Knows no token ids (see `tokenizer`), nor which text must not become a control token (see
`shield`), nor what is done to messages that a template refuses (see `template_renderer`).
"""

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.server.text.shield import one_line
from weft.server.text.template_calls import COMPILE, MAX_FAULT_CHARS, PROBE, REFUSED, RENDER
from weft.server.text.template_files import DEFAULT_NAME, TemplateFileError, read_chat_templates, read_text
from weft.server.text.template_process import ProcessDiedError, TemplateLimitError, TemplateProcesses, processes

logger = logging.getLogger(__name__)

TOOL_NAME = "tool_use"
"""The name in `transformers` of the template for chats with tools."""

RESERVED_NAMES = frozenset({"messages", "add_generation_prompt"})
"""Names that callers cannot set as variables, because each has a parameter of its own."""

NO_TEMPLATE = "this model has no chat template: use /v1/completions, or name one with --chat-template"
BROKEN = "use /v1/completions, or name another template with --chat-template"
"""What to do where a template is no use."""
MAX_SOURCE_CHARS = 1 << 20
MAX_SECONDS = 10.0
"""Of one rendering. Conversations of the largest body take a tenth."""
COMPILE_SECONDS = 3.0
"""A template of 50,000 characters takes a tenth."""
PROBE_SECONDS = 1.0
"""Of the renderings of short messages that tell which forms a template takes."""
_MAX_TOLD = 64
_keys = itertools.count(1)


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


class ChatTemplate:
    """One template. Rendering changes only what the log was told, so threads may share it.

    Attributes:
        source: Its text.
        names: Words by which the template looks up keys and compares values.
        variables: Names that the template uses and does not define.
    """

    def __init__(self, source: str, runner: TemplateProcesses | None = None) -> None:
        """Compile a source.

        Args:
            runner: None for the usual processes.

        Raises:
            ChatTemplateError: It is not a valid template; the message names the line.
        """
        self.source, self._key, self._runner = source, next(_keys), runner or processes()
        self._told: set[str] = set()
        self._fault: str | None = None  # why it is not used
        self._is_probed = False
        if len(source) > MAX_SOURCE_CHARS:
            fault = f"it must have at most {MAX_SOURCE_CHARS} characters, has {len(source)}"
            raise ChatTemplateError(f"the chat template is invalid: {fault}")
        try:
            outcome, _ = self._call(COMPILE, COMPILE_SECONDS)
        except TemplateLimitError as error:
            raise ChatTemplateError(f"the chat template is invalid: {error}") from None
        if outcome[0] == REFUSED:
            raise ChatTemplateError(f"the chat template is invalid{outcome[1]}")
        self.names, self.variables = frozenset[str](outcome[1]), frozenset[str](outcome[2])

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool,
        variables: Mapping[str, object],
        *,
        repairs: bool = True,
        call_texts: Sequence[str] = (),
    ) -> str:
        """Return the prompt text.

        Args:
            messages: JSON values, at least a role in each message.
            variables: Other names that the template may use: tools, documents, switches, special tokens.
            repairs: Say the messages in another way where the template refuses them or leaves out what they say.

        Raises:
            ChatTemplateError: The template refuses the messages, or fails; what it said of the messages as they are.
        """
        self._probe()
        try:
            outcome, prompt = self._call(
                RENDER, MAX_SECONDS, list(messages), add_generation_prompt, dict(variables), repairs, list(call_texts)
            )
        except TemplateLimitError as error:
            raise ChatTemplateError(f"the chat template cannot render these messages: {error}") from None
        except ValueError:
            raise ChatTemplateError("the messages are nested too deeply for a chat template") from None
        if outcome[0] == REFUSED:
            raise ChatTemplateError(outcome[1])
        for note in outcome[1]:
            if note not in self._told and len(self._told) < _MAX_TOLD:
                self._told.add(note)
                logger.warning("%s. This is said once", one_line(note, 2 * MAX_FAULT_CHARS))
        return prompt

    def _probe(self) -> None:
        """Have it tried with short messages; raises ChatTemplateError for a template that these are too much for."""
        if not self._is_probed:
            try:
                self._call(PROBE, PROBE_SECONDS)
            except ProcessDiedError as error:  # another time it may live
                raise ChatTemplateError(f"the chat template cannot be used: {error}") from None
            except TemplateLimitError as error:
                self._fault = f"the chat template is not used: {error} to render two short messages"
                logger.warning("%s", self._fault)
            self._is_probed = True
        if self._fault is not None:
            raise ChatTemplateError(f"{self._fault}: {BROKEN}")

    def _call(self, operation: str, seconds: float, *arguments: Any) -> tuple[list[Any], str]:
        return self._runner.call(operation, self._key, self.source, arguments, seconds)


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
