# ruff: noqa: RUF001 (the bars of DeepSeek and Step)
"""Chat templates that write calls as each family's published one does, written for these tests."""

_TURN = "{% for m in messages %}{% if m.tool_calls %}"
_CALLS = "{% for c in m.tool_calls %}"
_NEXT = "{% if not loop.last %}"
_OTHER = "{% else %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
_OBJECT = """{{ '{"name": "' + c.function.name + '", "arguments": ' }}{{ c.function.arguments | tojson }}}"""
_JSON_LIST = f"{_CALLS}{_OBJECT}{_NEXT}, {{% endif %}}{{% endfor %}}"
_RAW = "{{ v if v is string else v | tojson }}"
_ITEMS = "{% for k, v in c.function.arguments | items %}"


def _dsml(section: str) -> str:
    return (
        f"{_TURN}<｜DSML｜{section}>\n{_CALLS}"
        """<｜DSML｜invoke name="{{ c.function.name }}">\n"""
        f"{_ITEMS}"
        """<｜DSML｜parameter name="{{ k }}" string="{{ 'true' if v is string else 'false' }}">"""
        f"{_RAW}</｜DSML｜parameter>\n{{% endfor %}}</｜DSML｜invoke>\n{{% endfor %}}</｜DSML｜{section}>{_OTHER}"
    )


ALL = {
    "hermes": f"{_TURN}{_CALLS}{_NEXT}{{% endif %}}<tool_call>\n{_OBJECT}\n</tool_call>{{% endfor %}}{_OTHER}",
    "llama4_json": '<|header_start|>Respond as {"name": function name, "parameters": dictionary}.'
    f"{_TURN}<|python_start|>{_CALLS}"
    """{{ '{"name": "' + c.function.name + '", "parameters": ' }}{{ c.function.arguments | tojson }}}"""
    f"{_NEXT}; {{% endif %}}{{% endfor %}}<|python_end|>{_OTHER}",
    "mistral": "{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls[0].id | length != 9 %}"
    f"{{{{ raise_exception('ids have 9 characters') }}}}{{% endif %}}[TOOL_CALLS] [{_JSON_LIST}]{_OTHER}",
    "deepseek_v31": f"{_TURN}<｜tool▁calls▁begin｜>{_CALLS}"
    "{{ '<｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' + c.function.arguments + '<｜tool▁call▁end｜>' }}"
    f"{{% endfor %}}<｜tool▁calls▁end｜>{_OTHER}",
    "kimi_k2": f"<|im_system|>tool_declare<|im_middle|>{_TURN}<|tool_calls_section_begin|>{_CALLS}"
    "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|>"
    f"{{% endfor %}}<|tool_calls_section_end|>{_OTHER}",
    "cohere": f"{_TURN}<|START_ACTION|>[\n{_CALLS}"
    """    {"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ c.function.name }}", "parameters": """
    f"{{{{ c.function.arguments | tojson }}}}}}{_NEXT},\n{{% endif %}}{{% endfor %}}"
    f"{{{{ '\\n]' }}}}<|END_ACTION|>{_OTHER}",
    "nemotron": f"{_TURN}<TOOLCALL>[{_JSON_LIST}]</TOOLCALL>{_OTHER}",
    "hunyuan": f"{_TURN}<tool_calls>[{_JSON_LIST}]</tool_calls>{_OTHER}",
    "apertus": f"{_TURN}<|tools_prefix|>[{_CALLS}"
    """{{ '{"' + c.function.name + '": ' + c.function.arguments + '}' }}"""
    f"{_NEXT}, {{% endif %}}{{% endfor %}}]<|tools_suffix|>{_OTHER}",
    "seed": f"{_TURN}{_CALLS}<seed:tool_call>\n<function={{{{ c.function.name }}}}>\n{_ITEMS}"
    "<parameter={{ k }}>{{ v if v is string else v | string }}</parameter>\n{% endfor %}</function>\n"
    f"</seed:tool_call>{{% endfor %}}{_OTHER}",
    "minimax_m2": f"{_TURN}\n<minimax:tool_call>\n{_CALLS}"
    """{{ '<invoke name="' + c.function.name + '">' }}\n"""
    f"""{_ITEMS}{{{{ '<parameter name="' + k + '">' }}}}{_RAW}</parameter>\n{{% endfor %}}"""
    f"</invoke>\n{{% endfor %}}</minimax:tool_call>{_OTHER}",
    "step3": f"{_TURN}<｜tool_calls_begin｜>\n{_CALLS}"
    """<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{{ c.function.name }}">\n"""
    f"""{_ITEMS}<steptml:parameter name="{{{{ k }}}}">{_RAW}</steptml:parameter>\n{{% endfor %}}"""
    f"</steptml:invoke><｜tool_call_end｜>\n{{% endfor %}}<｜tool_calls_end｜>{_OTHER}",
    "lfm2": f"<|tool_list_start|>{_TURN}<|tool_call_start|>[{_CALLS}{{{{ c.function.name }}}}({_ITEMS}"
    f"{{{{ k }}}}={{{{ v | tojson }}}}{_NEXT}, {{% endif %}}{{% endfor %}}){_NEXT}, {{% endif %}}{{% endfor %}}"
    f"]<|tool_call_end|>{_OTHER}",
    "olmo3": f"{_TURN}<function_calls>\n{_CALLS}{{{{ c.function.name }}}}({_ITEMS}"
    '{{ k }}={{ "\'" + v + "\'" if v is string else v | tojson }}'
    f"{_NEXT}, {{% endif %}}{{% endfor %}})\n{{% endfor %}}</function_calls>{_OTHER}",
    "gigachat3": f"{_TURN}{_CALLS}<|message_sep|>\n\nfunction call<|role_sep|>\n{_OBJECT}{{% endfor %}}{_OTHER}",
    "minimax_m1": f"{_TURN}<tool_calls>\n{_CALLS}{_OBJECT}\n{{% endfor %}}</tool_calls>{_OTHER}",
    "command_r_plus": f"{_TURN}Action:\n```json\n[\n{_CALLS}"
    """    {\n        "tool_name": "{{ c.function.name }}",\n"""
    """        "parameters": {{ c.function.arguments | tojson }}"""
    f"\n    }}{_NEXT},\n{{% endif %}}{{% endfor %}}{{{{ '\\n]' }}}}```{_OTHER}",
    "functionary31": f"{_TURN}{_CALLS}<function={{{{ c.function.name }}}}>{{{{ c.function.arguments | tojson }}}}"
    f"</function>{{% endfor %}}{_OTHER}",
    "functionary": "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}"
    "{{ '>>>' + c.function.name + '\\n' }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{% elif m.role == 'assistant' %}>>>all\n{{ m.content }}{% else %}[{{ m.role }}]{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}>>>{% endif %}",
    "solar": f"{_TURN}<|tool_calls|>{_CALLS}"
    "{{ '<|tool_call:begin|>' + c.id + '<|tool_call:name|>' + c.function.name + '<|tool_call:args|>' }}"
    f"{{{{ c.function.arguments | tojson }}}}<|tool_call:end|>{{% endfor %}}<|calls|>{_OTHER}",
    "minicpm": f"""{_TURN}{_CALLS}<function name="{{{{ c.function.name }}}}">{_ITEMS}"""
    """<param name="{{ k }}">{{ v }}</param>{% endfor %}</function>"""
    f"{_NEXT}{{{{ '\\n' }}}}{{% endif %}}{{% endfor %}}{_OTHER}",
    "hy3": f"{_TURN}<tool_calls:opensource>\n{_CALLS}<tool_call:opensource>{{{{ c.function.name }}}}"
    f"<tool_sep:opensource>\n{_ITEMS}<arg_key:opensource>{{{{ k }}}}</arg_key:opensource>\n"
    f"<arg_value:opensource>{_RAW}</arg_value:opensource>\n{{% endfor %}}</tool_call:opensource>\n"
    f"{{% endfor %}}</tool_calls:opensource>{_OTHER}",
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "kimi_k3": f"{_TURN}<|open|>tools<|sep|>{_CALLS}"
    """<|open|>call tool="{{ c.function.name }}" index="{{ loop.index }}"<|sep|>"""
    f"""{_ITEMS}{{% set t = 'string' if v is string else 'boolean' if v is boolean else 'object' if v is mapping """
    """else 'number' %}<|open|>argument key="{{ k }}" type="{{ t }}"<|sep|>"""
    f"{_RAW}<|close|>argument<|sep|>{{% endfor %}}<|close|>call<|sep|>{{% endfor %}}<|close|>tools<|sep|>{_OTHER}",
    "gemma4": '{% macro value(v) %}{% if v is string %}<|"|>{{ v }}<|"|>{% elif v is mapping %}{{ "{" }}'
    '{% for k in v | sort %}<|"|>{{ k }}<|"|>:{{ value(v[k]) }}{% if not loop.last %},{% endif %}{% endfor %}}'
    "{% elif v is iterable %}[{% for x in v %}{{ value(x) }}{% if not loop.last %},{% endif %}{% endfor %}]"
    "{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
    f"{_TURN}{_CALLS}{{{{ '<|tool_call>call:' + c.function.name + '{{' }}}}"
    "{% for k in c.function.arguments | sort %}{{ k }}:{{ value(c.function.arguments[k]) }}"
    f"{_NEXT},{{% endif %}}{{% endfor %}}}}<tool_call|>{{% endfor %}}{_OTHER}",
    "minimax_m3": "{% set n = ']<]minimax[>[' %}{% macro value(v) %}{% if v is string %}{{ v }}{% elif v is mapping %}"
    "{% for k in v %}{{ n }}<{{ k }}>{{ value(v[k]) }}{{ n }}</{{ k }}>{% endfor %}{% elif v is iterable %}"
    "{% for x in v %}{{ n }}<item>{{ value(x) }}{{ n }}</item>{% endfor %}{% else %}{{ v | tojson }}{% endif %}"
    f"{{% endmacro %}}{_TURN}{{{{ n }}}}<tool_call>\n{_CALLS}"
    """{{ n }}<invoke name="{{ c.function.name }}">"""
    f"{_ITEMS}{{{{ n }}}}<{{{{ k }}}}>{{{{ value(v) }}}}{{{{ n }}}}</{{{{ k }}}}>{{% endfor %}}"
    f"{{{{ n }}}}</invoke>\n{{% endfor %}}{{{{ n }}}}</tool_call>{_OTHER}",
}
"""By the name of the format that they tell."""
