"""Tool formats whose calls have JSON arguments: tables of the signs in templates and the texts around calls.

Sources: the chat templates of the checkpoints. Hermes 2 Pro, Qwen 2.5, Qwen 3 (`hermes`); Llama 3.1 to 3.3
(`llama3_json`); Mistral 7B v0.3 to Small 3.1 write a list, Devstral, Magistral and Ministral 3 name and arguments with
`[ARGS]` (`mistral`); DeepSeek V3 and R1 (`deepseek_v3`), V3.1 (`deepseek_v31`); Granite 3 (`granite`; Granite 4 writes
as Hermes does); Phi-4-mini (`phi4`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from typing_extensions import override

from weft.server.formats import lark
from weft.server.formats.json_call_parser import JsonCallParser, Syntax
from weft.server.formats.parser import AnswerRules, OutputParser, Tool, ToolFormat


@dataclass(frozen=True, slots=True)
class Layout:
    """The exact texts around calls: `opening`, then calls with `between` between them, then `closing`.

    A call is `before`, its name, `middle`, its arguments, `after`.

    Attributes:
        trigger: The first text of `opening` or `before`, which cannot occur in content; None: a call may stand only
            where the output begins.
    """

    trigger: str | None
    opening: str
    before: str
    middle: str
    after: str
    between: str
    closing: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonCalls(ToolFormat):
    """A format of calls with JSON arguments.

    Attributes:
        syntax: What the parser accepts.
        layouts: What a constrained output may choose from.
    """

    syntax: Syntax
    layouts: tuple[Layout, ...]

    @override
    def parser(self, tools: Sequence[Tool]) -> OutputParser:
        return JsonCallParser(self.syntax, tools)

    @override
    def grammar(self, wanted: AnswerRules) -> str:
        # Nothing but calls follows a call.
        triggers = list(dict.fromkeys(layout.trigger for layout in self.layouts))
        named = [trigger for trigger in triggers if trigger is not None]
        not_first = "{" if None in triggers else ""
        has_text = wanted.content is None and not wanted.is_required
        lines = [f"arguments_{index}: {lark.arguments(tool)}" for index, tool in enumerate(wanted.tools)]
        answers = [] if wanted.is_required else [wanted.content or "text"]
        if has_text:
            lines.append(f"text: TEXT\nTEXT: {lark.text_without(named, not_first)}")
        for index, layout in enumerate(self.layouts):
            lines += self._calls(index, layout, wanted)
            answers.append(f"opened_{triggers.index(layout.trigger)} calls_{index}")
        for index, trigger in enumerate(triggers):
            if trigger is not None and has_text:
                lines.append(lark.text_up_to(f"opened_{index}", trigger, wanted.mark, named, not_first))
            else:
                lines.append(f"opened_{index}: {wanted.mark(trigger) if trigger else ''}")
        return "\n".join([f"answer: {' | '.join(answers)}", *lines, ""])

    def _calls(self, index: int, layout: Layout, wanted: AnswerRules) -> list[str]:
        """Rules for the calls of one layout, after its trigger."""
        spell = partial(lark.spell, markers=self.markers, mark=wanted.mark)
        if layout.trigger is None:  # the answer may be other JSON
            calls = [lark.json_lexemes(layout.before + tool.name + layout.middle) for tool in wanted.tools]
            first, between = "", spell(layout.between)
        else:
            calls = [spell(tool.name + layout.middle) for tool in wanted.tools]
            first = spell((layout.opening + layout.before).removeprefix(layout.trigger))
            between = spell(layout.between + layout.before)
        names = " | ".join(f"{call} arguments_{number}" for number, call in enumerate(calls))
        more = f"({between} call_{index})*" if wanted.allows_many else ""
        return [
            f"call_{index}: ({names}) {spell(layout.after)}",
            f"calls_{index}: {first} call_{index} {more} {spell(layout.closing)}",
        ]


def _objects(
    trigger: str | None, opening: str, closing: str = "", between: str = ", ", key: str = "arguments"
) -> Layout:
    """The layout of calls that are JSON objects of a name and, under `key`, arguments."""
    return Layout(trigger, opening, '{"name": "', f'", "{key}": ', "}", between, closing)


HERMES = JsonCalls(
    name="hermes",
    markers=("<tool_call>", "</tool_call>"),
    present=("<tool_call>", "</tool_call>", r"\barguments\b"),
    absent=("<function=", "<arg_key>", "<parameter", "<tool_calls>"),
    syntax=Syntax(openers=("<tool_call>",), fillers=("</tool_call>",)),
    layouts=(
        Layout("<tool_call>", "", '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", between="\n"),
    ),
)

LLAMA3_JSON = JsonCalls(
    name="llama3_json",
    markers=("<|python_tag|>",),
    present=(r"<\|start_header_id\|>", r'\{\\?"name\\?": ', r'\\?"parameters\\?": '),
    absent=("<tool_call>", "<function="),
    syntax=Syntax(openers=("<|python_tag|>",), fillers=(";",), is_bare=True),
    layouts=tuple(
        _objects(trigger, trigger or "", between="; ", key="parameters") for trigger in (None, "<|python_tag|>")
    ),
)

MISTRAL = JsonCalls(
    name="mistral",
    markers=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    present=(r"\[TOOL_CALLS\]",),
    syntax=Syntax(
        openers=("[TOOL_CALLS]",), fillers=(",", "]"), before_name=(), after_name=("[ARGS]",), id_marker="[CALL_ID]"
    ),
    layouts=(
        _objects("[TOOL_CALLS]", "[TOOL_CALLS][", "]"),
        _objects("[TOOL_CALLS]", "[TOOL_CALLS] [", "]"),
        Layout("[TOOL_CALLS]", "", "[TOOL_CALLS]", "[ARGS]", after="", between=""),
    ),
)

_CALLS_BEGIN, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"  # noqa: RUF001 (as DeepSeek writes it)
_CALL_BEGIN, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001
_SEPARATOR = "<｜tool▁sep｜>"  # noqa: RUF001
_DEEPSEEK_MARKERS = (_CALLS_BEGIN, _CALL_BEGIN, _SEPARATOR, _CALL_END, _CALLS_END)
_BEFORE_V3, _MIDDLE_V3, _AFTER_V3 = f"{_CALL_BEGIN}function{_SEPARATOR}", "\n```json\n", f"\n```{_CALL_END}"

DEEPSEEK_V3 = JsonCalls(
    name="deepseek_v3",
    markers=_DEEPSEEK_MARKERS,
    present=(_CALL_BEGIN, "```json"),
    syntax=Syntax(
        openers=(_CALLS_BEGIN, _CALL_BEGIN),
        fillers=("```", _CALL_END, _CALLS_END),
        before_name=("function", _SEPARATOR),
        after_name=("```json",),
    ),
    layouts=(Layout(_CALLS_BEGIN, _CALLS_BEGIN, _BEFORE_V3, _MIDDLE_V3, _AFTER_V3, "\n", _CALLS_END),),
)

DEEPSEEK_V31 = JsonCalls(
    name="deepseek_v31",
    markers=_DEEPSEEK_MARKERS,
    present=(_CALL_BEGIN,),
    absent=("```json",),
    syntax=Syntax(
        openers=(_CALLS_BEGIN, _CALL_BEGIN), fillers=(_CALL_END, _CALLS_END), before_name=(), after_name=(_SEPARATOR,)
    ),
    layouts=(Layout(_CALLS_BEGIN, _CALLS_BEGIN, _CALL_BEGIN, _SEPARATOR, _CALL_END, "", _CALLS_END),),
)

GRANITE = JsonCalls(
    name="granite",
    markers=("<|tool_call|>", "<tool_call>"),
    present=(r"<\|start_of_role\|>", r"<\|tool_call\|>|<tool_call>"),
    absent=("</tool_call>",),
    syntax=Syntax(openers=("<|tool_call|>", "<tool_call>"), fillers=(",", "]")),
    layouts=tuple(_objects(trigger, f"{trigger}[", "]") for trigger in ("<|tool_call|>", "<tool_call>")),
)

PHI4 = JsonCalls(
    name="phi4",
    markers=("<|tool_call|>", "<|/tool_call|>"),
    present=(r"<\|/tool\|>|<\|/tool_call\|>|functools\[",),
    absent=(r"<\|start_of_role\|>",),
    syntax=Syntax(openers=("<|tool_call|>", "functools["), fillers=(",", "]", "<|/tool_call|>")),
    layouts=(
        _objects("<|tool_call|>", "<|tool_call|>[", "]<|/tool_call|>"),
        _objects("functools[", "functools[", "]"),
    ),
)

ALL = (HERMES, LLAMA3_JSON, MISTRAL, DEEPSEEK_V3, DEEPSEEK_V31, GRANITE, PHI4)
