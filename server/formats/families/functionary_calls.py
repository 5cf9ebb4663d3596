r"""Calls of functionary 3.2: every part of an output has a recipient.

    >>>all\nCONTENT>>>NAME\n{ARGUMENTS}>>>NAME\n{ARGUMENTS}

The prompt ends with the first `>>>`, so an output begins with a recipient, also where no tools are. A part to a
recipient that is no tool is content as it was written.

Source: the chat template of functionary 3.2.
"""

from collections.abc import Sequence

from typing_extensions import override

from weft.server.formats import grammar as lark
from weft.server.formats.parser import AnswerRules, OutputParser, Scanner, Steps, Tool, ToolFormat

_BEGIN, _ALL = ">>>", "all\n"


class _FunctionaryParser(Scanner):
    def __init__(self, tools: Sequence[Tool]) -> None:
        self._recipients = {f"{tool.name}\n": tool.name for tool in tools}
        super().__init__()

    def _read(self) -> Steps[None]:
        self._hold()
        yield from self._next(_BEGIN)
        while True:
            recipient = yield from self._next(_ALL, *self._recipients, skips_blanks=False)
            name = self._recipients.get(recipient or "")
            if recipient == _ALL:
                self._release()
            elif name is not None and (yield from self._peek()) == "{":
                self._begin_call(name, "")
                yield from self._json(self._tell_arguments)
            else:
                self._give_back()
            if (yield from self._until((_BEGIN,), self._tell_content)) is None:
                return
            self._hold(_BEGIN)


class Functionary(ToolFormat):
    """Calls of functionary 3.2."""

    @override
    def parser(self, tools: Sequence[Tool]) -> OutputParser:
        return _FunctionaryParser(tools)

    @override
    def grammar(self, wanted: AnswerRules) -> str:
        tools = wanted.tools
        answers = [] if wanted.is_required else [f"{lark.literal(_ALL)} {wanted.content or 'PLAIN'}"]
        rules = [] if wanted.is_required or wanted.content else [f"PLAIN: {lark.text_without([_BEGIN])}\n"]
        if tools:
            answers.append("calls")
            more = f" ({lark.literal(_BEGIN)} call)*" if wanted.allows_many else ""
            rules.append(f"calls: call{more}\ncall: {' | '.join(f'call_{i}' for i in range(len(tools)))}\n")
            if rules[0].startswith("PLAIN"):
                answers.append(f"{lark.literal(_ALL)} before calls")
                rules.append(lark.text_up_to("before", _BEGIN, wanted.mark))
        for i, tool in enumerate(tools):
            recipient = lark.literal(tool.name + "\n")
            rules.append(f"call_{i}: {recipient} {lark.arguments(tool)}\n")
        return f"answer: {' | '.join(answers)}\n{''.join(rules)}"


FUNCTIONARY = Functionary(name="functionary", models="functionary 3.2", markers=(), present=(">>>all",), reads_all=True)
