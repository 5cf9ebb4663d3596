"""Tool formats whose arguments are raw text between tags: Qwen3-Coder, GLM 4.5 and later, MiniMax M2, Seed-OSS, Step 3.

Qwen3-Coder (its chat template; vLLM and SGLang read it likewise, also without the outer tag, which it may forget; Qwen
3.5, Nemotron 3 and Step 3.5 write the same):

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

GLM (line breaks until 4.6, none from 4.7 on):

    <tool_call>NAME
    <arg_key>KEY</arg_key>
    <arg_value>VALUE</arg_value>
    </tool_call>

MiniMax M2 and Step 3 put all calls into one section:

    <minimax:tool_call>
    <invoke name="NAME">
    <parameter name="KEY">VALUE</parameter>
    </invoke>
    </minimax:tool_call>

So do Hy3, whose keys and values have tags of their own as GLM's, DeepSeek V3.2 and V4, and Kimi K3. The last two tell
the type of each value. MiniCPM 5 has no section and no line breaks.

One line break at either end of a Qwen value belongs to the format.
"""

from weft.server.formats.grammar import INDEX
from weft.server.formats.xml_calls import XmlFormat

QWEN3_CODER = XmlFormat(
    name="qwen3_coder",
    models="Qwen3-Coder, Qwen 3.5, Nemotron 3, Step 3.5",
    markers=("<tool_call>", "</tool_call>"),
    present=("<tool_call>", "<function=", "<parameter="),
    line_break='"\\n"',
    openings=("<tool_call>", "<function="),
    name_tags=("<function=", ">"),
    key_tags=("<parameter=", ">"),
    value_tags=("\n", "\n</parameter>"),
    ends=("</function>", "</tool_call>"),
)
GLM = XmlFormat(
    name="glm",
    models="GLM 4.5 and later, Ling 3, Laguna, Spark 2.5",
    markers=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    present=("<tool_call>", "<arg_key>", "<arg_value>"),
    line_break='"\\n"?',
    openings=("<tool_call>",),
    key_tags=("<arg_key>", "</arg_key>"),
    value_tags=("\n<arg_value>", "</arg_value>"),
    ends=("</tool_call>",),
)
SEED = XmlFormat(
    name="seed",
    models="Seed-OSS",
    markers=("<seed:tool_call>", "</seed:tool_call>"),
    present=("<seed:tool_call>", "<function="),
    line_break='"\\n"',
    openings=("<seed:tool_call>",),
    name_tags=("<function=", ">"),
    key_tags=("<parameter=", ">"),
    value_tags=("", "</parameter>"),
    ends=("</function>", "</seed:tool_call>"),
)
MINIMAX_M2 = XmlFormat(
    name="minimax_m2",
    models="MiniMax M2",
    markers=("<minimax:tool_call>", "</minimax:tool_call>"),
    present=("<minimax:tool_call>", "<invoke name="),
    line_break='"\\n"',
    openings=("<minimax:tool_call>", '<invoke name="'),
    name_tags=('<invoke name="', '">'),
    key_tags=('<parameter name="', '">'),
    value_tags=("", "</parameter>"),
    ends=("</invoke>", "</minimax:tool_call>"),
    is_section=True,
)
_STEP_CALL, _STEP_SEPARATOR = "<｜tool_call_begin｜>", "<｜tool_sep｜>"  # noqa: RUF001 (as Step writes it)
_STEP_END, _STEP_CALLS = "<｜tool_call_end｜>", ("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>")  # noqa: RUF001
_STEP_HEAD = f'{_STEP_CALL}function{_STEP_SEPARATOR}<steptml:invoke name="'
STEP3 = XmlFormat(
    name="step3",
    models="Step 3",
    markers=(*_STEP_CALLS, _STEP_CALL, _STEP_SEPARATOR, _STEP_END),
    present=("<steptml:invoke",),
    line_break='"\\n"?',
    openings=(_STEP_CALLS[0], _STEP_HEAD),
    name_tags=(_STEP_HEAD, '">'),
    key_tags=('<steptml:parameter name="', '">'),
    value_tags=("", "</steptml:parameter>"),
    ends=("</steptml:invoke>", _STEP_END, _STEP_CALLS[1]),
    is_section=True,
)
MINICPM = XmlFormat(
    name="minicpm",
    models="MiniCPM5",
    markers=(),
    present=('<function name="', '<param name="'),
    line_break="",
    openings=('<function name="',),
    name_tags=("", '">'),
    key_tags=('<param name="', '">'),
    value_tags=("", "</param>"),
    ends=("</function>",),
)
_HY_TAGS = tuple(f"{tag}:opensource>" for tag in ("tool_calls", "tool_call", "arg_key", "arg_value"))
_HY_SECTION, _HY_CALL, _HY_KEY, _HY_VALUE = _HY_TAGS
_HY_SEPARATOR = "<tool_sep:opensource>"
HY3 = XmlFormat(
    name="hy3",
    models="Hy3",
    markers=(*(f"{bracket}{tag}" for tag in _HY_TAGS for bracket in ("<", "</")), _HY_SEPARATOR),
    present=(":opensource", "<tool_sep"),
    line_break='"\\n"',
    openings=(f"<{_HY_SECTION}", f"<{_HY_CALL}"),
    name_tags=(f"<{_HY_CALL}", _HY_SEPARATOR),
    key_tags=(f"<{_HY_KEY}", f"</{_HY_KEY}"),
    value_tags=(f"\n<{_HY_VALUE}", f"</{_HY_VALUE}"),
    ends=(f"</{_HY_CALL}", f"</{_HY_SECTION}"),
    is_section=True,
)
_DSML = "｜DSML｜"  # noqa: RUF001 (as DeepSeek writes it)
_NOT_STRING = ("integer", "number", "boolean", "null", "object", "array")


def _dsml(name: str, models: str, section: str) -> XmlFormat:
    """DeepSeek's markup language, whose calls stand in this section."""
    begin, end = f"<{_DSML}", f"</{_DSML}"
    return XmlFormat(
        name=name,
        models=models,
        markers=(_DSML,),
        present=(_DSML, f"{section}>"),
        line_break='"\\n"',
        openings=(f"{begin}{section}>", f'{begin}invoke name="'),
        name_tags=(f'{begin}invoke name="', '">'),
        key_tags=(f'{begin}parameter name="', '"'),
        value_tags=("", f"{end}parameter>"),
        type_tags=((("string",), ' string="true">'), (_NOT_STRING, ' string="false">')),
        ends=(f"{end}invoke>", f"{end}{section}>"),
        is_section=True,
    )


DEEPSEEK_V32 = _dsml("deepseek_v32", "DeepSeek V3.2", "function_calls")
DEEPSEEK_V4 = _dsml("deepseek_v4", "DeepSeek V4", "tool_calls")
KIMI_K3 = XmlFormat(
    name="kimi_k3",
    models="Kimi K3",
    markers=("<|open|>", "<|close|>", "<|sep|>"),
    present=(r"<\|open\|>", r"<\|close\|>", r"<\|sep\|>"),
    line_break="",
    openings=("<|open|>tools<|sep|>", '<|open|>call tool="'),
    name_tags=('<|open|>call tool="', f'" index="{INDEX}"<|sep|>'),
    key_tags=('<|open|>argument key="', '"'),
    value_tags=("", "<|close|>argument<|sep|>"),
    type_tags=tuple(
        (types, f' type="{name}"<|sep|>')
        for name, types in (
            ("string", ("string",)),
            ("number", ("integer", "number")),
            *((name, (name,)) for name in ("boolean", "null", "object", "array")),
        )
    ),
    ends=("<|close|>call<|sep|>", "<|close|>tools<|sep|>"),
    is_section=True,
)
ALL = (QWEN3_CODER, GLM, SEED, MINIMAX_M2, STEP3, MINICPM, HY3, DEEPSEEK_V32, DEEPSEEK_V4, KIMI_K3)
