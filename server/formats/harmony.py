"""Harmony, the format of gpt-oss: an output is one or more messages with headers.

    <|channel|>analysis<|message|>TEXT<|end|><|start|>assistant<|channel|>final<|message|>TEXT<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{ARGUMENTS}<|call|>

The recipient may also stand before the channel (`<|start|>assistant to=functions.NAME<|channel|>commentary`), and the
type may lack its marker. Models also call on other channels and forget `functions.`. All of that is read. The prompt
ends with `<|start|>assistant`, so the first header lacks it. The analysis channel is reasoning; every other message
without a recipient is content. A line break separates messages of one kind. A message to a recipient that is no tool is
content as it was written, markup included. Arguments are JSON already and are passed on unchanged, but for numbers that
JSON lacks, which become null.

Sources: OpenAI's "Harmony response format", the chat template of gpt-oss, reports on what models really write in the
issues of vLLM and llama.cpp.
"""

import re
from collections.abc import Sequence
from functools import partial

from typing_extensions import override

from weft.server.formats import grammar as lark
from weft.server.formats.parser import AnswerRules, Kind, OutputParser, Scanner, Steps, Tool, ToolFormat

_START, _CHANNEL, _MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_END, _CALL, _RETURN = "<|end|>", "<|call|>", "<|return|>"
_ENDS = (_END, _CALL, _RETURN)
_NEXT = "<|start|>assistant"
_NO_JSON = ("NaN", "Infinity", "-Infinity")
_ANALYSIS = re.compile(r"<\|channel\|>\s*analysis\b")
_PART_OF_HEADER = re.compile(
    r"\s*(?>(?>assistant|to=[^\s<]*|<(?:\|(?:[cm][a-z]*(?:\|>?)?)?)?|analysis|commentary|final|json|code)\s*)*+[a-z]*"
)
_MAX_HEADER = 512


class _HarmonyParser(Scanner):
    def __init__(self, tools: Sequence[Tool]) -> None:
        self._recipients = {spelled: tool.name for tool in tools for spelled in (tool.name, f"functions.{tool.name}")}
        spaced = sorted((re.escape(name) for name in self._recipients if " " in name), key=len, reverse=True)
        names = "|".join([*spaced, r"[^\s<]+"])
        self._recipient = re.compile(rf"(?:^|\s)to=({names})(?=[\s<]|$)")
        self._told: set[Kind] = set()  # kinds of the messages so far that have text
        self._gap = ""  # told before the next text of this message
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
        if recipient := self._recipient.search(header):
            return (yield from self._read_addressed(self._recipients.get(recipient[1])))
        self._release()
        self.region = Kind.REASONING if _ANALYSIS.search(opening + header) else Kind.CONTENT
        self._gap = "\n" if self.region in self._told else ""
        return (yield from self._until((*_ENDS, _NEXT), self._tell_message))

    def _read_header(self) -> Steps[str | None]:
        """Step over a header and `<|message|>`; None: it is no header, and nothing has been read."""
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
        """Read the text of a message to a tool; if `name` is None, it is to another recipient and is content."""
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
        while (end := (yield from self._until(('"', *_NO_JSON, *_ENDS), self._tell_arguments))) not in (None, *_ENDS):
            self._tell_arguments("null" if end in _NO_JSON else '"')
            if end == '"' and not (yield from self._json_string(self._tell_arguments)):  # a string holds no marker
                return None
        return end

    def _tell_message(self, text: str) -> None:
        """Tell text of a message; a line break separates two messages of one kind."""
        text, self._gap = self._gap + text, ""
        self._told.add(self.region)
        if self.region is Kind.CONTENT:
            self._tell_content(text)
        else:
            self._tell(self.region, text)


class Harmony(ToolFormat):
    """Reads and constrains reasoning as well as calls."""

    @override
    def parser(self, tools: Sequence[Tool]) -> OutputParser:
        return _HarmonyParser(tools)

    @override
    def grammar(self, wanted: AnswerRules) -> str:
        """Write rules as `ToolFormat` says, but `answer` is the whole output, with the analysis before the answer.

        Without any tool the output is analysis and the final channel.
        """
        tools, mark, content, is_required = wanted.tools, wanted.mark, wanted.content, wanted.is_required
        spell = partial(lark.spell, markers=self.markers, mark=mark)
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


HARMONY = Harmony(
    name="harmony",
    models="gpt-oss",
    markers=(_START, _END, _MESSAGE, _CHANNEL, _CONSTRAIN, _RETURN, _CALL),
    present=(r"<\|start\|>", r"<\|channel\|>final<\|message\|>"),
    reads_all=True,
)
