"""Tool formats whose calls have JSON arguments: tables of the signs in templates and the texts around calls.

Sources: the chat templates of the checkpoints.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from typing_extensions import override

from weft.server.formats import grammar as lark
from weft.server.formats.grammar import INDEX
from weft.server.formats.json_call_parser import JsonCallParser, Syntax
from weft.server.formats.parser import AnswerRules, OutputParser, Tool, ToolFormat

ID = "\1"  # stands in a layout for an id of the call, which matches the format's pattern of ids


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

    @property
    @override
    def call_texts(self) -> Sequence[str]:
        first = self.layouts[0]
        texts = first.opening, first.before, first.middle, first.after, first.between, first.closing
        return () if {INDEX, ID} & set("".join(texts)) else texts

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
        numbers: dict[str, int] = {}  # of equal rules, as of free arguments, the first stands for all
        firsts = [numbers.setdefault(lark.arguments(tool), index) for index, tool in enumerate(wanted.tools)]
        lines = [f"arguments_{index}: {rule}" for rule, index in numbers.items()]
        answers = [] if wanted.is_required else [wanted.content or "text"]
        if has_text:
            lines.append(f"text: TEXT\nTEXT: {lark.text_without(named, not_first)}")
        for index, layout in enumerate(self.layouts):
            lines += self._calls(index, layout, wanted, firsts)
            answers.append(f"opened_{triggers.index(layout.trigger)} calls_{index}")
        for index, trigger in enumerate(triggers):
            if trigger is not None and has_text:
                lines.append(lark.text_up_to(f"opened_{index}", trigger, wanted.mark, named, not_first))
            else:
                lines.append(f"opened_{index}: {wanted.mark(trigger) if trigger else ''}")
        return "\n".join([f"answer: {' | '.join(answers)}", *lines, ""])

    def _calls(self, index: int, layout: Layout, wanted: AnswerRules, rules: Sequence[int]) -> list[str]:
        """Rules for the calls of one layout, after its trigger; `rules` has the number of each tool's arguments."""

        def mark(text: str) -> str:
            return places.get(text) or wanted.mark(text)

        places = {INDEX: "/[0-9]{1,4}/", ID: f"/{self.call_id_pattern}/"}
        spell = partial(lark.spell, markers=(*self.markers, *places), mark=mark)
        if layout.trigger is None:  # the answer may be other JSON
            calls = [lark.json_lexemes(layout.before + tool.name + layout.middle) for tool in wanted.tools]
            first, between = "", spell(layout.between)
        else:
            calls = [spell(tool.name + layout.middle) for tool in wanted.tools]
            first = spell((layout.opening + layout.before).removeprefix(layout.trigger))
            between = spell(layout.between + layout.before)
        names = " | ".join(f"{call} arguments_{number}" for call, number in zip(calls, rules, strict=True))
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
    models="Hermes 2 and 3, Qwen 2.5, Qwen 3, QwQ, Granite 4, Ernie 4.5, SmolLM 3, Exaone 4, MiMo, Bielik, Reka",
    markers=("<tool_call>", "</tool_call>"),
    present=("<tool_call>", "</tool_call>", r"\barguments\b"),
    absent=("<function=", "<arg_key>", "<parameter", "<tool_calls>"),
    syntax=Syntax(openers=("<tool_call>",), fillers=("</tool_call>",)),
    layouts=tuple(
        Layout("<tool_call>", "", '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", between)
        for between in ("\n", "")
    ),
)

LLAMA3_JSON = JsonCalls(
    name="llama3_json",
    models="Llama 3.1 to 3.3",
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
    models="Mistral 7B v0.3 to Small 3.1 (a list); Devstral, Magistral, Ministral 3 (with `[ARGS]`)",
    markers=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    present=(r"\[TOOL_CALLS\]",),
    call_id="{index:09}",
    call_id_pattern="[a-zA-Z0-9]{9}",
    syntax=Syntax(
        openers=("[TOOL_CALLS]",), fillers=(",", "]"), before_name=(), after_name=("[ARGS]",), id_marker="[CALL_ID]"
    ),
    layouts=(
        _objects("[TOOL_CALLS]", "[TOOL_CALLS][", "]"),
        _objects("[TOOL_CALLS]", "[TOOL_CALLS] [", "]"),
        Layout("[TOOL_CALLS]", "[TOOL_CALLS][", '{"name": "', '", "arguments": ', f', "id": "{ID}"}}', ", ", "]"),
        Layout("[TOOL_CALLS]", "", "[TOOL_CALLS]", "[ARGS]", after="", between=""),
        Layout("[TOOL_CALLS]", "", "[TOOL_CALLS]", f"[CALL_ID]{ID}[ARGS]", after="", between=""),
    ),
)

_CALLS_BEGIN, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"  # noqa: RUF001 (as DeepSeek writes it)
_CALL_BEGIN, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001
_SEPARATOR = "<｜tool▁sep｜>"  # noqa: RUF001
_DEEPSEEK_MARKERS = (_CALLS_BEGIN, _CALL_BEGIN, _SEPARATOR, _CALL_END, _CALLS_END)
_BEFORE_V3, _MIDDLE_V3, _AFTER_V3 = f"{_CALL_BEGIN}function{_SEPARATOR}", "\n```json\n", f"\n```{_CALL_END}"

DEEPSEEK_V3 = JsonCalls(
    name="deepseek_v3",
    models="DeepSeek V3, R1",
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
    models="DeepSeek V3.1",
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
    models="Granite 3",
    markers=("<|tool_call|>", "<tool_call>"),
    present=(r"<\|start_of_role\|>", r"<\|tool_call\|>|<tool_call>"),
    absent=("</tool_call>",),
    syntax=Syntax(openers=("<|tool_call|>", "<tool_call>"), fillers=(",", "]")),
    layouts=tuple(_objects(trigger, f"{trigger}[", "]") for trigger in ("<|tool_call|>", "<tool_call>")),
)

PHI4 = JsonCalls(
    name="phi4",
    models="Phi-4-mini, Firefunction",
    markers=("<|tool_call|>", "<|/tool_call|>"),
    present=(r"<\|/tool\|>|<\|/tool_call\|>|functools\[",),
    absent=(r"<\|start_of_role\|>",),
    syntax=Syntax(openers=("<|tool_call|>", "functools["), fillers=(",", "]", "<|/tool_call|>")),
    layouts=(_objects("<|tool_call|>", "<|tool_call|>[", "]<|/tool_call|>"), _objects("functools[", "functools[", "]")),
)

KIMI_K2 = JsonCalls(
    name="kimi_k2",
    models="Kimi K2",
    markers=(
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    ),
    present=(r"<\|im_middle\|>", "tool_declare"),
    call_id="functions.{name}:{index}",
    call_id_pattern=r"functions\..+:[0-9]+",
    syntax=Syntax(
        openers=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
        fillers=("<|tool_call_end|>", "<|tool_calls_section_end|>"),
        before_name=("functions.",),
        after_name=("<|tool_call_argument_begin|>",),
        id_marker=":",
    ),
    layouts=(
        Layout(
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_begin|>",
            "<|tool_call_begin|>functions.",
            f":{INDEX}<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            between="",
            closing="<|tool_calls_section_end|>",
        ),
    ),
)

COHERE = JsonCalls(
    name="cohere",
    models="Command R7B, Command A",
    markers=("<|START_ACTION|>", "<|END_ACTION|>"),
    present=(r"<\|START_ACTION\|>",),
    syntax=Syntax(openers=("<|START_ACTION|>",), fillers=(",", "]", "<|END_ACTION|>")),
    layouts=(
        Layout(
            "<|START_ACTION|>",
            "<|START_ACTION|>[\n    ",
            f'{{"tool_call_id": "{INDEX}", "tool_name": "',
            '", "parameters": ',
            "}",
            between=",\n    ",
            closing="\n]<|END_ACTION|>",
        ),
    ),
)

LLAMA4_JSON = JsonCalls(
    name="llama4_json",
    models="Llama 4",
    markers=("<|python_start|>", "<|python_end|>"),
    present=(r"<\|header_start\|>", r'\{\\?"name\\?": ', r'\\?"parameters\\?": '),
    syntax=Syntax(openers=("<|python_start|>", "<|python_end|>"), fillers=(";", "<|python_end|>"), is_bare=True),
    layouts=(
        _objects(None, "", between="; ", key="parameters"),
        _objects("<|python_start|>", "<|python_start|>", "<|python_end|>", "; ", "parameters"),
    ),
)


def _tagged_list(name: str, models: str, begin: str, end: str) -> JsonCalls:
    """A format of calls that are one JSON list between two tags, which are its sign, too."""
    return JsonCalls(
        name=name,
        models=models,
        markers=(begin, end),
        present=(begin,),
        syntax=Syntax(openers=(begin,), fillers=(",", "]", end)),
        layouts=(_objects(begin, f"{begin}[", f"]{end}"),),
    )


NEMOTRON = _tagged_list("nemotron", "Nemotron Nano 2, Llama Nemotron Super 1.5", "<TOOLCALL>", "</TOOLCALL>")
HUNYUAN = _tagged_list("hunyuan", "Hunyuan A13B, Jamba, Apriel", "<tool_calls>", "</tool_calls>")

APERTUS = JsonCalls(
    name="apertus",
    models="Apertus",
    markers=("<|tools_prefix|>", "<|tools_suffix|>"),
    present=(r"<\|tools_prefix\|>",),
    syntax=Syntax(openers=("<|tools_prefix|>",), fillers=(",", "]", "<|tools_suffix|>"), name_is_key=True),
    layouts=(Layout("<|tools_prefix|>", "<|tools_prefix|>[", '{"', '": ', "}", ", ", "]<|tools_suffix|>"),),
)

ALL = (
    *(HERMES, LLAMA3_JSON, LLAMA4_JSON, MISTRAL, DEEPSEEK_V3, DEEPSEEK_V31, GRANITE, PHI4),
    *(KIMI_K2, COHERE, NEMOTRON, HUNYUAN, APERTUS),
)
