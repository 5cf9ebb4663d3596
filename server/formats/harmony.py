"""Harmony, which gpt-oss writes: an output is one or more messages, and their headers say what is what.

    <|channel|>analysis<|message|>TEXT<|end|><|start|>assistant<|channel|>final<|message|>TEXT<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{ARGUMENTS}<|call|>

The recipient may stand before the channel as well (`<|start|>assistant to=functions.NAME<|channel|>commentary`), the
type may lack its marker, and models call on other channels and forget `functions.`; all of that is read. The prompt
ends with `<|start|>assistant`, so the first header lacks it. The analysis channel is reasoning; every other text that
goes to nobody is content. Messages of one kind are separated by a line break. A message to someone who is no tool is
content as it was written, markup included. Arguments are JSON already and pass as they are.

Sources: OpenAI's "Harmony response format", the chat template of gpt-oss, vLLM's and llama.cpp's reports on what models
really write.
"""

import re
from collections.abc import Callable, Sequence

from weft.server.formats import lark
from weft.server.formats.parser import AnswerRules, Kind, OutputParser, Tool
from weft.server.formats.scanner import Scanner, Steps

_START, _CHANNEL, _MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_END, _CALL, _RETURN = "<|end|>", "<|call|>", "<|return|>"
_ENDS = (_END, _CALL, _RETURN)
_NEXT = "<|start|>assistant"
_RECIPIENT = re.compile(r"(?:^|\s)to=([^\s<]+)")
_ANALYSIS = re.compile(r"<\|channel\|>\s*analysis\b")
_PART_OF_HEADER = re.compile(
    r"\s*(?>(?>assistant|to=[^\s<]*|<(?:\|(?:[cm][a-z]*(?:\|>?)?)?)?|analysis|commentary|final|json|code)\s*)*+[a-z]*"
)
_MAX_HEADER = 512


class _HarmonyParser(Scanner):
    def __init__(self, tools: Sequence[Tool]) -> None:
        self._recipients = {spelled: tool.name for tool in tools for spelled in (tool.name, f"functions.{tool.name}")}
        self._told: set[Kind] = set()
        super().__init__()

    def _read(self) -> Steps[None]:
        self._hold()
        opening = yield from self._next("to=", _CHANNEL, _CONSTRAIN, _MESSAGE, _START)
        if opening is None:
            self._give_back()
        elif opening != _START:  # the prompt ended with it
            self._at -= len(opening)
            opening = ""
        while True:
            if opening is not None:
                opening = yield from self._read_message(opening)
            if opening != _NEXT:
                opening = yield from self._until((_START, _CHANNEL), self._tell_content)
                if opening is None:
                    return
            self._hold(opening)

    def _read_message(self, opening: str) -> Steps[str | None]:
        """Read header and text; return what ended the message."""
        header = yield from self._read_header()
        if header is None:
            if self._is_over and _PART_OF_HEADER.fullmatch(self._text, self._at):
                self._at = len(self._text)  # markup that is cut off
            else:
                self._give_back()
            return None
        recipient = _RECIPIENT.search(header)
        if recipient is not None:
            return (yield from self._read_addressed(self._recipients.get(recipient[1])))
        self._release()
        self.region = Kind.REASONING if _ANALYSIS.search(opening + header) else Kind.CONTENT
        return (yield from self._until((*_ENDS, _NEXT), self._message(self.region)))

    def _read_header(self) -> Steps[str | None]:
        """Step over a header and `<|message|>`; None: it is none, and nothing has been read."""
        while True:
            size = self._text[self._at : self._at + _MAX_HEADER + len(_MESSAGE)].find(_MESSAGE)
            if size >= 0:
                header = self._text[self._at : self._at + size]
                if any(marker in header for marker in (_START, *_ENDS)):
                    return None
                self._at += size + len(_MESSAGE)
                return header
            if self._is_over or len(self._text) - self._at >= _MAX_HEADER + len(_MESSAGE):
                return None
            yield

    def _read_addressed(self, name: str | None) -> Steps[str | None]:
        """Read the text of a message to a tool; None: to someone else, then header and text are content."""
        brace = name and (yield from self._next("{", *_ENDS))
        if name is None or brace is None:
            self._give_back()
            end = yield from self._until(_ENDS, self._tell_content)
            self._tell_content(end or "")
            return end
        self._begin_call(name)
        if brace != "{":
            self._tell_arguments("}")
            return brace
        while (end := (yield from self._until(('"', *_ENDS), self._tell_arguments))) == '"':
            self._tell_arguments(end)
            if not (yield from self._json_string(self._tell_arguments)):  # in which nothing is a marker
                return None
        return end

    def _message(self, kind: Kind) -> Callable[[str], None]:
        """What tells the text of a new message; a line break is between two of one kind."""
        gap = "\n" if kind in self._told else ""

        def tell(text: str) -> None:
            nonlocal gap
            text, gap = gap + text, ""
            self._told.add(kind)
            if kind is Kind.CONTENT:
                self._tell_content(text)
            else:
                self._tell(kind, text)

        return tell


class Harmony:
    """A `ToolFormat`, and the reasoning of its models as well."""

    name = "harmony"
    markers = (_START, _END, _MESSAGE, _CHANNEL, _CONSTRAIN, _RETURN, _CALL)

    def is_used_by(self, template: str) -> bool:
        """Tell from the header of the final channel."""
        return _START in template and "<|channel|>final<|message|>" in template

    def parser(self, tools: Sequence[Tool]) -> OutputParser:
        """A parser for an output that may call these tools; it reads channels without any tool as well."""
        return _HarmonyParser(tools)

    def grammar(self, wanted: AnswerRules) -> str:
        """As `ToolFormat` says, but `answer` is the whole output: analysis comes before the final channel or calls.

        Without any tool it is analysis and the final channel.
        """
        tools, mark, content, is_required = wanted.tools, wanted.mark, wanted.content, wanted.is_required

        def spell(text: str) -> str:
            return lark.spell(text, self.markers, mark)

        after_call = f" ({mark(_CALL)} {spell(_NEXT)} call)*" if wanted.allows_many else ""
        answers = ([] if is_required else ["final"]) + (["calls"] if tools else [])
        rules = [
            f"answer: (thought{'' if is_required or content else ' | preamble'})* ({' | '.join(answers)})\n",
            f"thought: {spell('<|channel|>analysis<|message|>')} text {spell(_NEXT)}\n",
            f"preamble: {spell('<|channel|>commentary<|message|>')} text {spell(_NEXT)}\n",
            lark.text_up_to("text", _END, mark, [marker for marker in self.markers if marker != _END]),
            f"FINAL: {lark.text_without(self.markers)}\n",
            f"final: {spell('<|channel|>final<|message|>')} {content or 'FINAL'} {mark(_RETURN)}?\n",
            f'type: (" "? {mark(_CONSTRAIN)} "json" | " json")? {mark(_MESSAGE)}\n',
        ]
        if tools:
            rules.append(f"calls: call{after_call} {mark(_CALL)}?\n")
            rules.append(f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}\n")
        for i, tool in enumerate(tools):
            heads = f"<|channel|>commentary to=functions.{tool.name}", f" to=functions.{tool.name}<|channel|>commentary"
            rules.append(f"call_{i}: ({' | '.join(map(spell, heads))}) type {lark.arguments(tool)}\n")
        return "".join(rules)


HARMONY = Harmony()
