r"""More tool formats whose calls have JSON arguments: GigaChat 3, MiniMax M1, Command R+, functionary 3.1, Solar Open.

    <|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "NAME", "arguments": {...}}          GigaChat 3
    <|function_call|>{"name": "NAME", "arguments": {...}}                                     GigaChat 3.1
    <tool_calls>\n{"name": "NAME", "arguments": {...}}\n</tool_calls>                        MiniMax M1
    Action:\n```json\n[\n    {"tool_name": "NAME", "parameters": {...}}\n]```               Command R+
    <function=NAME>{...}</function>                                                           functionary 3.1
    <|tool_call:begin|>ID<|tool_call:name|>NAME<|tool_call:args|>{...}<|tool_call:end|>       Solar Open

Command R+ writes each member on a line of its own.

Sources: the chat templates of the checkpoints.
"""

from weft.server.formats.json_call_parser import Syntax
from weft.server.formats.json_calls import ID, JsonCalls, Layout

_ROLE = "<|message_sep|>\n\nfunction call<|role_sep|>\n"
_GIGACHAT_BEFORE, _GIGACHAT_MIDDLE = '{"name": "', '", "arguments": '
GIGACHAT3 = JsonCalls(
    name="gigachat3",
    models="GigaChat 3, 3.1",
    markers=("<|message_sep|>", "<|role_sep|>", "<|function_call|>"),
    present=(r"<\|role_sep\|>", "function call<|<\\|function_call\\|>"),
    syntax=Syntax(openers=(_ROLE, "<|function_call|>"), fillers=()),
    layouts=tuple(
        Layout(trigger, opening, _GIGACHAT_BEFORE, _GIGACHAT_MIDDLE, "}", opening)
        for trigger, opening in (("<|message_sep|>", _ROLE), ("<|function_call|>", "<|function_call|>"))
    ),
)

MINIMAX_M1 = JsonCalls(
    name="minimax_m1",
    models="MiniMax M1",
    markers=("<tool_calls>", "</tool_calls>"),
    present=("<tool_calls>", "<beginning_of_sentence>"),
    syntax=Syntax(openers=("<tool_calls>",), fillers=("</tool_calls>",)),
    layouts=(Layout("<tool_calls>", "<tool_calls>\n", '{"name": "', '", "arguments": ', "}", "\n", "\n</tool_calls>"),),
)

_ACTION = "Action:\n```json\n["
COMMAND_R_PLUS = JsonCalls(
    name="command_r_plus",
    models="Command R+",
    markers=(),
    present=("Action:", '"tool_name"'),
    absent=(r"<\|START_ACTION\|>",),
    syntax=Syntax(openers=(_ACTION, "Action: ```json"), fillers=(",", "]", "```")),
    layouts=(
        Layout(
            _ACTION,
            f"{_ACTION}\n    ",
            '{\n        "tool_name": "',
            '",\n        "parameters": ',
            "\n    }",
            between=",\n    ",
            closing="\n]```",
        ),
    ),
)

FUNCTIONARY31 = JsonCalls(
    name="functionary31",
    models="functionary 3.1, Llama 3.1 with templates that ask for it",
    markers=(),
    present=("<function=", "</function>"),
    absent=("<parameter",),
    syntax=Syntax(openers=("<function=",), fillers=("</function>",), before_name=(), after_name=(">",)),
    layouts=(Layout("<function=", "", "<function=", ">", "</function>", between=""),),
)

_SOLAR_CALLS, _SOLAR_END = "<|tool_calls|>", "<|calls|>"
_SOLAR_CALL, _SOLAR_NAME, _SOLAR_ARGUMENTS, _SOLAR_CALL_END = (
    f"<|tool_call:{part}|>" for part in ("begin", "name", "args", "end")
)
SOLAR = JsonCalls(
    name="solar",
    models="Solar Open",
    markers=(_SOLAR_CALLS, _SOLAR_CALL, _SOLAR_NAME, _SOLAR_ARGUMENTS, _SOLAR_CALL_END, _SOLAR_END),
    present=(r"<\|tool_call:begin\|>",),
    call_id="{index:010}",
    call_id_pattern="[a-z0-9]{10}",
    syntax=Syntax(
        openers=(_SOLAR_CALLS, _SOLAR_CALL),
        fillers=(_SOLAR_CALL_END, _SOLAR_END),
        before_name=(),
        after_name=(_SOLAR_ARGUMENTS,),
        id_end=_SOLAR_NAME,
    ),
    layouts=(
        Layout(
            _SOLAR_CALLS,
            _SOLAR_CALLS,
            f"{_SOLAR_CALL}{ID}{_SOLAR_NAME}",
            _SOLAR_ARGUMENTS,
            _SOLAR_CALL_END,
            between="",
            closing=_SOLAR_END,
        ),
    ),
)

ALL = (GIGACHAT3, MINIMAX_M1, COMMAND_R_PLUS, FUNCTIONARY31, SOLAR)
