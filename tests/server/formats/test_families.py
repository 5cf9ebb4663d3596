"""What a family's template writes of earlier calls, its format reads; what models were seen to write is read alike."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.server.formats.family_templates_for_tests import ALL
from tests.server.formats.feeding import assert_told
from tests.tokenizers_for_tests import byte_level, write_checkpoint
from weft.server.formats import reasoning
from weft.server.formats.detection import TOOL_FORMATS, choose_formats, renderer
from weft.server.formats.parser import Tool
from weft.server.formats.reasoning import ReasoningBlock, ReasoningFormat
from weft.server.text.chat_template import TemplateOptions
from weft.server.text.tokenizer import Tokenizer

_PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "more": {"type": "object"},
        "sure": {"type": "boolean"},
    },
}
TOOLS = [Tool("get_weather", _PARAMETERS), Tool("now", {"type": "object", "properties": {}})]
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("get_weather", {"city": "Köln am Rhein", "days": 3, "more": {"a": [True, None]}, "sure": False}),
    ("now", {}),
]
_TAKES_TEXT = ("deepseek_v31", "apertus")


def _messages(family: str, arguments: Any = lambda value: value) -> list[dict[str, Any]]:
    ids = {"kimi_k2": "functions.{1}:{0}", "solar": "{0:010}"}.get(family, "{0:09}")
    calls = [
        {"id": ids.format(i, name), "type": "function", "function": {"name": name, "arguments": arguments(given)}}
        for i, (name, given) in enumerate(CALLS)
    ]
    return [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": calls}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("families"), byte_level(), {})


@pytest.mark.parametrize("family", ALL)
def test_calls_are_rendered_as_transformers_does_and_read_back(folder: Path, family: str) -> None:
    """Templates of DeepSeek and Apertus want arguments as text: with objects, the second turn of a chat failed."""
    (folder / "chat_template.jinja").write_text(ALL[family], encoding="utf-8")
    reference = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), chat_template=ALL[family])
    wanted = _messages(family, (lambda value: json.dumps(value, ensure_ascii=False)) if family in _TAKES_TEXT else dict)
    golden = reference.apply_chat_template(wanted, tokenize=False)
    rendered = "".join(Tokenizer.load(folder).render_chat(_messages(family), TemplateOptions(False)))
    assert rendered == golden

    formats = choose_formats(ALL[family], "auto", lambda _: None, renderer(Tokenizer.load(folder)))
    assert formats.tools is not None
    assert formats.tools.name == family
    tools = formats.tools
    expected = [
        piece
        for name, given in CALLS
        for piece in (("CALL", name), ("ARGUMENTS", json.dumps(given, ensure_ascii=False)))
    ]
    written = golden[golden.index("Hi") + 2 :]
    assert_told(lambda: tools.parser(TOOLS), written, expected)


OUTPUTS: dict[str, tuple[str, ReasoningFormat, str, list[tuple[str, str]]]] = {
    "kimi k2 thinking": (
        "kimi_k2",
        reasoning.THINK,
        "<think>Let me see.</think>I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        [("REASONING", "Let me see."), ("CONTENT", "I look."), ("CALL", "now"), ("ARGUMENTS", "{}")],
    ),
    "command r7b": (
        "cohere",
        reasoning.COHERE,
        '<|START_THINKING|>I will look.<|END_THINKING|><|START_ACTION|>[\n    {"tool_call_id": "0", '
        '"tool_name": "now", "parameters": {}}\n]<|END_ACTION|>',
        [("REASONING", "I will look."), ("CALL", "now"), ("ARGUMENTS", "{}")],
    ),
    "command a answers": (
        "cohere",
        reasoning.COHERE,
        "<|START_THINKING|>Easy.<|END_THINKING|><|START_RESPONSE|>It rains.<|END_RESPONSE|>",
        [("REASONING", "Easy."), ("CONTENT", "It rains.")],
    ),
    "hunyuan": (
        "hunyuan",
        reasoning.HUNYUAN,
        "<think>\nHm.\n</think>\n<answer>\nIt rains.\n</answer>",
        [("REASONING", "Hm."), ("CONTENT", "It rains.")],
    ),
    "ernie": (
        "hermes",
        reasoning.ERNIE,
        '<think>\nHm.\n</think>\n\n\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n',
        [("REASONING", "Hm."), ("CALL", "now"), ("ARGUMENTS", "{}")],
    ),
    "seed with a budget": (
        "seed",
        reasoning.SEED,
        "<seed:think>Let me.\n<seed:cot_budget_reflect>I used 9 tokens.</seed:cot_budget_reflect></seed:think>\n"
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Graz</parameter>\n"
        "<parameter=more>{'a': True}</parameter>\n</function>\n</seed:tool_call>",
        [
            ("REASONING", "Let me.\n<seed:cot_budget_reflect>I used 9 tokens.</seed:cot_budget_reflect>"),
            ("CALL", "get_weather"),
            ("ARGUMENTS", '{"city": "Graz", "more": {"a": true}}'),
        ],
    ),
    "minimax m2": (
        "minimax_m2",
        reasoning.THINK,
        '<think>\nHm.\n</think>\n\nLet me look.\n<minimax:tool_call>\n<invoke name="now">\n</invoke>\n'
        '<invoke name="get_weather">\n<parameter name="city">Graz\nWest</parameter>\n'
        '<parameter name="days">3</parameter>\n'
        "</invoke>\n</minimax:tool_call>",
        [
            ("REASONING", "Hm."),
            ("CONTENT", "Let me look."),
            ("CALL", "now"),
            ("ARGUMENTS", "{}"),
            ("CALL", "get_weather"),
            ("ARGUMENTS", '{"city": "Graz\\nWest", "days": 3}'),
        ],
    ),
    "lfm2": (
        "lfm2",
        reasoning.THINK,
        '<|tool_call_start|>[get_weather(city="Graz")]<|tool_call_end|>I look at Graz.',
        [("CALL", "get_weather"), ("ARGUMENTS", '{"city": "Graz"}'), ("CONTENT", "I look at Graz.")],
    ),
    "olmo 3": (
        "olmo3",
        reasoning.THINK,
        "<function_calls>get_weather(city='Graz', sure=false, more=null)\nnow()</function_calls>",
        [
            ("CALL", "get_weather"),
            ("ARGUMENTS", '{"city": "Graz", "sure": false, "more": null}'),
            ("CALL", "now"),
            ("ARGUMENTS", "{}"),
        ],
    ),
    "llama 4": (
        "llama4_json",
        reasoning.THINK,
        '<|python_start|>I look.<|python_end|>{"name": "now", "parameters": {}}',
        [("CONTENT", "<|python_start|>I look."), ("CALL", "now"), ("ARGUMENTS", "{}")],
    ),
    "apertus": (
        "apertus",
        reasoning.APERTUS,
        '<|inner_prefix|>Hm.<|inner_suffix|><|tools_prefix|>[{"get_weather": {"city": "Graz"}}]<|tools_suffix|>',
        [("REASONING", "Hm."), ("CALL", "get_weather"), ("ARGUMENTS", '{"city": "Graz"}')],
    ),
}


@pytest.mark.parametrize("case", OUTPUTS)
def test_whole_outputs_of_the_families(case: str) -> None:
    family, thinks, text, expected = OUTPUTS[case]
    tools = next(format for format in TOOL_FORMATS if format.name == family)
    assert_told(lambda: thinks.parser(ReasoningBlock.NOT_BEGUN, tools.parser(TOOLS)), text, expected)
