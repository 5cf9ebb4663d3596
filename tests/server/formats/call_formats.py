# ruff: noqa: RUF001 (the bars of DeepSeek)
"""Calls written out as each family's chat template writes them, and fragments of such templates."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Call = tuple[str, str]
"""A name, and its arguments as JSON text."""


def _object(call: Call, key: str = "arguments") -> str:
    return f'{{"name": "{call[0]}", "{key}": {call[1]}}}'


def _list(calls: Sequence[Call]) -> str:
    return "[" + ", ".join(map(_object, calls)) + "]"


def hermes(calls: Sequence[Call]) -> str:
    return "\n".join(f"<tool_call>\n{_object(call)}\n</tool_call>" for call in calls)


def llama3(calls: Sequence[Call]) -> str:
    return "; ".join(_object(call, "parameters") for call in calls)


def deepseek_v3(calls: Sequence[Call]) -> str:
    written = (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return "<｜tool▁calls▁begin｜>" + "\n".join(written) + "<｜tool▁calls▁end｜>"


def deepseek_v31(calls: Sequence[Call]) -> str:
    written = (f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{text}<｜tool▁call▁end｜>" for name, text in calls)
    return "<｜tool▁calls▁begin｜>" + "".join(written) + "<｜tool▁calls▁end｜>"


def kimi_k2(calls: Sequence[Call]) -> str:
    written = (
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls)
    )
    return "<|tool_calls_section_begin|>" + "".join(written) + "<|tool_calls_section_end|>"


def cohere(calls: Sequence[Call]) -> str:
    written = (
        f'    {{"tool_call_id": "{index}", "tool_name": "{name}", "parameters": {arguments}}}'
        for index, (name, arguments) in enumerate(calls)
    )
    return "<|START_ACTION|>[\n" + ",\n".join(written) + "\n]<|END_ACTION|>"


def apertus(calls: Sequence[Call]) -> str:
    return "<|tools_prefix|>[" + ", ".join(f'{{"{name}": {text}}}' for name, text in calls) + "]<|tools_suffix|>"


@dataclass(frozen=True)
class Way:
    """One way in which a format may be written."""

    format: str
    write: Callable[[Sequence[Call]], str]
    takes_content: bool = True


WAYS = {
    "hermes": Way("hermes", hermes),
    "llama3_json": Way("llama3_json", llama3, takes_content=False),
    "llama3_json_tag": Way("llama3_json", lambda calls: "<|python_tag|>" + llama3(calls)),
    "mistral_list": Way("mistral", lambda calls: "[TOOL_CALLS]" + _list(calls)),
    "mistral_list_space": Way("mistral", lambda calls: "[TOOL_CALLS] " + _list(calls)),
    "mistral_args": Way("mistral", lambda calls: "".join(f"[TOOL_CALLS]{n}[ARGS]{a}" for n, a in calls)),
    "deepseek_v3": Way("deepseek_v3", deepseek_v3),
    "deepseek_v31": Way("deepseek_v31", deepseek_v31),
    "granite": Way("granite", lambda calls: "<|tool_call|>" + _list(calls)),
    "granite_xml": Way("granite", lambda calls: "<tool_call>" + _list(calls)),
    "phi4": Way("phi4", lambda calls: "<|tool_call|>" + _list(calls) + "<|/tool_call|>"),
    "phi4_functools": Way("phi4", lambda calls: "functools" + _list(calls)),
    "llama4_json": Way("llama4_json", llama3, takes_content=False),
    "llama4_json_tag": Way("llama4_json", lambda calls: f"<|python_start|>{llama3(calls)}<|python_end|>"),
    "kimi_k2": Way("kimi_k2", kimi_k2),
    "cohere": Way("cohere", cohere),
    "nemotron": Way("nemotron", lambda calls: f"<TOOLCALL>{_list(calls)}</TOOLCALL>"),
    "hunyuan": Way("hunyuan", lambda calls: f"<tool_calls>{_list(calls)}</tool_calls>"),
    "apertus": Way("apertus", apertus),
}

TEMPLATES = {
    "hermes": """\
    {{- "\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:\\n<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\
\\n</tool_call><|im_end|>\\n" }}
    {%- for tool_call in message.tool_calls %}
        {{- '\\n<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
        {{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}
    {%- endfor %}""",
    "hermes_in_granite_4": """\
{%- set tools_system_message_suffix = '</tools>\\n\\nFor each tool call, return a json object with function name and \
arguments within <tool_call></tool_call> XML tags:\\n<tool_call>\\n{"name": <function-name>, "arguments": \
<args-json-object>}\\n</tool_call>. If a tool does not exist' %}
{{- '<|start_of_role|>assistant<|end_of_role|>' }}""",
    "llama3_json": """\
    {{- "<|start_header_id|>system<|end_header_id|>\\n\\nEnvironment: ipython\\n" }}
    {{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.' }}
            {{- '{"name": "' + tool_call.name + '", ' }}{{- '"parameters": ' }}{{- tool_call.arguments | tojson }}""",
    "mistral_list": """\
        {{- "[TOOL_CALLS] [" }}{%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}{{- out[:-1] }}""",
    "mistral_args": "{{- '[TOOL_CALLS]' + tool['function']['name'] + '[ARGS]' + arguments }}",
    "deepseek_v3": """\
{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] + '\\n' \
+ '```json' + '\\n' + tool['function']['arguments'] + '\\n' + '```' + '<｜tool▁call▁end｜>'}}""",
    "deepseek_v31": """\
{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ tool['function']['name'] + '<｜tool▁sep｜>' \
+ tool['function']['arguments'] + '<｜tool▁call▁end｜>'}}""",
    "granite": """\
{%- set system_message = "You are Granite. When a tool is required to answer the user's query, respond with \
<|tool_call|> followed by a JSON list of tools used." %}{{- '<|start_of_role|>system<|end_of_role|>' }}""",
    "phi4": "{{ '<|' + message['role'] + '|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' }}",
    "phi4_functools": 'formatted as functools[{"name": [function name], "arguments": [function arguments as JSON]}]',
    "llama4_json": """\
    {{- '<|header_start|>user<|header_end|>' -}}
    {{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.' }}
    {{- '{"name": "' + call.function.name + '", ' }}{{- '"parameters": ' }}{{- call.function.arguments | tojson }}""",
    "kimi_k2": """\
{% if tools %}{{ '<|im_system|>tool_declare<|im_middle|>' + (tools | tojson) + '<|im_end|>' }}{% endif %}""",
    "kimi_k2_thinking": """\
<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|tool_calls_section_begin|><|tool_call_begin|>{{ call.id }}\
<|tool_call_argument_begin|>{{ call['function']['arguments'] | tojson }}<|tool_call_end|><|tool_calls_section_end|>""",
    "cohere": """\
1. Action: write <|START_ACTION|> followed by a list of JSON-formatted tool calls, with "tool_name" and "parameters"
```json{% for tc in message.tool_calls %}{"tool_call_id": "{{ i }}", "tool_name": "{{ tc['function']['name'] }}", \
"parameters": {{ tc['function']['arguments']|tojson }}}{% endfor %}]<|END_ACTION|>""",
    "nemotron": """\
{{- '<TOOLCALL>[' -}}{{- '{"name": "' + fn.name + '", "arguments": ' -}}{{- fn.arguments | tojson -}}
{{- ']</TOOLCALL>' }}""",
    "hunyuan": """\
format every call as <tool_calls>[{"name": "func_name1", "arguments": {"argument1": "value1"}},...]</tool_calls>""",
    "apertus": """\
{%- set tool_calls_token = '<|tools_prefix|>' -%}{%- set end_tool_calls_token = '<|tools_suffix|>' -%}
{{- '{"' + function.name + '": ' + function.arguments + '}' }}""",
    "hermes_in_ernie": """\
{{- "<tool_list>\\n" }}Return a JSON object with name and arguments within <tool_call></tool_call> tags, \
{{- '<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}{{- tool_call.arguments | tojson }}\
{{- '}\\n</tool_call>\\n' }}{{- '\\n<response>\\n' + content + '\\n</response>\\n' }}""",
    "other_minimax": """\
{%- set toolcall_begin_token = '<minimax:tool_call>' -%}<invoke name="tool-name-1">
<parameter name="param-key-1">param-value-1</parameter>""",
    "other_step_3": '<steptml:invoke name="tool_name"><steptml:parameter name="x">{{ arguments }}</steptml:parameter>',
    "other_lfm2": "List of tools: <|tool_list_start|>[{{ tools }}]<|tool_list_end|> arguments",
    "other_olmo3": "<function_calls>\\nget_weather(city='New York')\\n</function_calls> arguments",
    "other_qwen_coder": """\
reply in the following format with NO suffix:\\n\\n<tool_call>\\n<function=example_function_name>\\n\
<parameter=example_parameter_1>\\nvalue_1\\n</parameter>\\n</function>\\n</tool_call> arguments""",
    "other_glm": """\
For each function call, output the function name and arguments within the following XML format:
<tool_call>{function-name}\\n<arg_key>{arg-key-1}</arg_key>\\n<arg_value>{arg-value-1}</arg_value>\\n</tool_call>""",
    "other_harmony": "{{- '<|start|>assistant to=functions.' + tool_call.name + '<|channel|>commentary json' }}",
    "other_llama_pythonic": """\
{{- "<|start_header_id|>system<|end_header_id|>" }}[func_name1(params_name1=params_value1, ...)]""",
    "other_seed": "<seed:tool_call>\\n<function=example_function_name>\\n</seed:tool_call> arguments",
    "other_plain": "{% for m in messages %}<|im_start|>{{ m['role'] }}\\n{{ m['content'] }}<|im_end|>{% endfor %}",
}
"""Fragments; what comes before the first "_" (or the name of a format) says which format has to recognize it."""
