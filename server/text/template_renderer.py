"""Renders messages with one chat template, in the process that is for that (see `template_child`).

Messages reach the template in the forms that it takes (see `template_forms`). Where it refuses them, or leaves out what
they say, they are said in another way (see `conversation_repairs`), and it is noted. No prompt is silently poorer than
its messages. Invariant: for the same messages the text equals that of `apply_chat_template`. A template is foreign
code: it runs in a sandbox, and every failure in it is a `RefusedError`, except that memory was lacking.
"""

import copy
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from weft.server.text.conversation_repairs import shows_all, tools_told, ways
from weft.server.text.template_calls import MAX_FAULT_CHARS
from weft.server.text.template_forms import MessageForms, completed, wanted_forms, with_tools
from weft.server.text.template_sandbox import LIST_CHANGES, compiled

Messages = list[dict[str, Any]]
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")


class RefusedError(Exception):
    """The template refuses the messages, or fails. The message is fit for the client."""


class TemplateRenderer:
    """One compiled template.

    Attributes:
        names: Words by which the template looks up keys and compares values.
        variables: Names that the template uses and does not define.
        notes: What the log should be told of the last rendering.
    """

    def __init__(self, source: str) -> None:
        """Compile a source.

        Raises:
            TemplateSourceError: It is not a valid template; the message names the line.
        """
        self._template, names, self.variables = compiled(source)
        self._changes_lists = not LIST_CHANGES.isdisjoint(names)
        self.names = names | {"role", *_REASONING_NAMES}
        self.notes: list[str] = []
        self._call_texts: Sequence[str] = ()
        self._knows_developer = "developer" in source

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool,
        variables: Mapping[str, object],
        repairs: bool,
        call_texts: Sequence[str] = (),
    ) -> str:
        """Return the prompt text.

        Args:
            messages: JSON values, at least a role in each message.
            variables: Other names that the template may use: tools, documents, switches, special tokens.
            repairs: Say the messages in another way where the template refuses them or leaves out what they say.

        Raises:
            RefusedError: The template refuses the messages, or fails; what it said of the messages as they are.
            MemoryError: There is too little.
        """
        self.notes, self._call_texts = [], call_texts
        given, forms = with_tools(variables, self.variables), self.forms
        seen = {"documents": None, **given, "add_generation_prompt": add_generation_prompt}
        seen |= {} if given.get("tools") else forms.no_tools
        adapted = [self._adapt(message) for message in messages]
        if repairs and isinstance(tools := given.get("tools"), list) and tools and not self.forms.shows_tools:
            adapted = tools_told(adapted, tools)
            self.notes.append("the chat template shows no tools; they are in the system message")
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

    def _tried(self, messages: Messages, seen: Mapping[str, object]) -> tuple[str | None, RefusedError | None]:
        """The prompt, or why the template refuses it."""
        try:
            return self._render(messages, seen), None
        except MemoryError:
            raise
        except RefusedError as error:
            return None, error

    def _render(self, messages: Messages, seen: Mapping[str, object]) -> str:
        shown = [self.forms.applied(message) for message in messages]
        if self._changes_lists:  # it may change what others hold
            shown, seen = copy.deepcopy((shown, dict(seen)))
        try:
            return self._template.render(seen, messages=shown)
        except MemoryError:
            raise
        except Exception as error:  # foreign code raises what it likes
            fault = str(error)[:MAX_FAULT_CHARS]
            raise RefusedError(f"the chat template refuses these messages: {fault}") from error

    def _repaired(
        self, messages: Messages, seen: Mapping[str, object], prompt: str | None, refused: RefusedError | None
    ) -> str | None:
        """The first prompt that shows everything, else the first of all; None: the template refuses every way."""
        why = str(refused) if refused else "the chat template leaves out a part of these messages"
        for done, repaired in ways(messages, self._call_texts):
            try:
                tried = self._render(repaired, seen)
            except RefusedError:
                continue
            if shows_all(tried, repaired):
                self.notes.append(f"{why}; {done}")
                return tried
            prompt = tried if prompt is None else prompt
        if prompt is not None:
            self.notes.append(f"{why}; the prompt does not show everything")
        return prompt

    @functools.cached_property
    def forms(self) -> MessageForms:
        """The forms in which it takes messages."""
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
