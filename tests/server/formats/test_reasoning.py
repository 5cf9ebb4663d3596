# ruff: noqa: RUF001 (the bars of DeepSeek)


import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import chat_templates_for_tests
from tests.linear_time import assert_linear
from tests.server.formats.feeding import assert_told, cut_at, feed_all
from weft.server.formats import json_calls, reasoning
from weft.server.formats.parser import Kind, OutputParser, Tool
from weft.server.formats.reasoning import ContentParser, ReasoningBlock, ReasoningFormat, Switch

TOOLS = [Tool("f", {"type": "object"})]
FORMATS = {format.name: format for format in reasoning.ALL}


def parser(format: ReasoningFormat, block: ReasoningBlock = ReasoningBlock.NOT_BEGUN) -> OutputParser:
    return format.parser(block, ContentParser())


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_reasoning_and_content(format: ReasoningFormat) -> None:
    thought = f"Well,\n\n1 < 2 \n{format.begin} and {format.end[:-1]}"
    begin, end = format.begin + format.answer_begin * 0, format.end
    text = f"{thought}\n\n{end}\n\n{format.answer_begin}Yes.\n{begin} <{format.answer_end}"
    expected = [("REASONING", thought), ("CONTENT", f"Yes.\n{begin} <")]
    assert_told(lambda: parser(format), f"{begin}\n{text}", expected)
    assert_told(lambda: parser(format), f"\n {begin}{text}", expected)
    assert_told(lambda: parser(format, ReasoningBlock.OPEN), f"\n\n{text}", expected)
    assert_told(lambda: parser(format, ReasoningBlock.OPEN), text, expected)


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_outputs_without_the_whole_block(format: ReasoningFormat) -> None:
    assert_told(lambda: parser(format), f" \n No {format.begin}", [("CONTENT", f" \n No {format.begin}")])
    assert_told(lambda: parser(format), format.begin[:-1], [("CONTENT", format.begin[:-1])])
    assert_told(lambda: parser(format), "\n ", [("CONTENT", "\n ")])
    assert_told(lambda: parser(format), f"{format.begin}\n{format.end}\nYes", [("CONTENT", "Yes")])
    assert_told(lambda: parser(format), f"{format.begin}\n\n", [])
    for block, begin in ((ReasoningBlock.NOT_BEGUN, format.begin), (ReasoningBlock.OPEN, "")):
        unended = f"On and on\n{format.end[:-1]}"
        assert_told(lambda block=block: parser(format, block), f"{begin}{unended}", [("REASONING", unended)])
    closed = f"{format.begin} is content {format.end}"
    content = closed.replace(format.answer_end, "") if format.answer_end else closed
    assert_told(lambda: parser(format, ReasoningBlock.CLOSED), closed, [("CONTENT", content)])


@pytest.mark.parametrize("format", [format for format in FORMATS.values() if format.answer_end], ids=lambda f: f.name)
def test_markers_of_an_answer_without_reasoning(format: ReasoningFormat) -> None:
    """Command and Hunyuan write them where no reasoning came before, or the prompt has closed it."""
    for block in (ReasoningBlock.NOT_BEGUN, ReasoningBlock.CLOSED):
        for text in ("{}Yes.\n <b{}", "{}\nYes.\n <b\n{}\n"):
            written = text.format(format.answer_begin, format.answer_end)
            assert_told(lambda block=block: parser(format, block), written, [("CONTENT", "Yes.\n <b")])
    assert format.block(f"<|CHATBOT_TOKEN|>{format.answer_begin}") is ReasoningBlock.CLOSED
    assert_told(lambda: parser(format, ReasoningBlock.CLOSED), f"Yes{format.answer_end}", [("CONTENT", "Yes")])


def test_a_call_may_stand_inside_of_the_answer() -> None:
    call = '<tool_calls>[{"name": "f", "arguments": {"a": 1}}]</tool_calls>'
    for text in (f"<think>\nHm\n</think>\n<answer>\n{call}\n</answer>", f"<think>\nHm\n</think>\n{call}"):
        assert_told(
            lambda: reasoning.HUNYUAN.parser(ReasoningBlock.NOT_BEGUN, json_calls.HUNYUAN.parser(TOOLS)),
            text,
            [("REASONING", "Hm"), ("CALL", "f"), ("ARGUMENTS", '{"a": 1}')],
        )


def test_calls_behind_reasoning() -> None:
    """Calls inside the block are reasoning, those after it are calls."""
    call = '<tool_call>\n{"name": "f", "arguments": {"a": "</think>"}}\n</tool_call>'
    expected = [
        ("REASONING", '<tool_call>\n{"name": "f", "arguments": {"a": "'),
        ("CONTENT", '"}}\n</tool_call>'),
        ("CALL", "f"),
        ("ARGUMENTS", '{"a": "</think>"}'),
    ]
    assert_told(
        lambda: reasoning.THINK.parser(ReasoningBlock.OPEN, json_calls.HERMES.parser(TOOLS)),
        f"{call}\n{call}\n",
        expected,
    )


def test_the_region_follows_the_text() -> None:
    parser = reasoning.THINK.parser(ReasoningBlock.NOT_BEGUN, json_calls.HERMES.parser(TOOLS))
    regions = []
    for part in ("<think>", "a", "</think>", "\n", "b", '<tool_call>{"na', 'me": "f"}</tool_call>', "c"):
        parser.feed(part)
        regions.append(parser.region)
    reasons, content, call = Kind.REASONING, Kind.CONTENT, Kind.CALL
    assert regions == [reasons, reasons, reasons, reasons, content, call, call, content]
    assert reasoning.THINK.parser(ReasoningBlock.OPEN, ContentParser()).region is Kind.REASONING


def test_reasoning_streams_as_it_comes() -> None:
    parser = reasoning.THINK.parser(ReasoningBlock.OPEN, ContentParser())
    assert parser.feed("\nSo") == [(Kind.REASONING, "So")]
    assert parser.feed(" far\n") == [(Kind.REASONING, " far")]
    assert parser.feed("</th") == []
    assert parser.feed("x") == [(Kind.REASONING, "\n</thx")]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(list(FORMATS.values())),
    st.sampled_from(ReasoningBlock),
    st.lists(st.integers(0, 300), max_size=8),
    st.data(),
)
def test_random_texts_and_cuts(
    format: ReasoningFormat, block: ReasoningBlock, cuts: list[int], data: st.DataObject
) -> None:
    words = [*format.markers, "<", "</", "\n", "\n\n", " ", "a", "[", "Here is"]
    text = "".join(data.draw(st.lists(st.sampled_from(words), max_size=8)))
    whole = feed_all(parser(format, block), [text] if text else [])
    assert feed_all(parser(format, block), text) == whole
    assert feed_all(parser(format, block), cut_at(text, cuts)) == whole


@pytest.mark.parametrize(
    ("block", "character"),
    [(ReasoningBlock.OPEN, "x"), (ReasoningBlock.OPEN, "\n"), (ReasoningBlock.NOT_BEGUN, " ")],
    ids=["letters", "newlines", "blanks"],
)
def test_200_kilobytes_take_linear_time(block: ReasoningBlock, character: str) -> None:
    def parse(num_characters: int) -> None:
        parser = reasoning.GRANITE.parser(block, ContentParser())
        for _ in range(num_characters):
            parser.feed(character)
        parser.finish()

    assert_linear(parse, 200_000)


@pytest.mark.parametrize(
    ("name", "prompt", "block"),
    [
        ("think", "<|im_start|>assistant\n", ReasoningBlock.NOT_BEGUN),
        ("think", "<|im_start|>assistant\n<think>\n", ReasoningBlock.OPEN),
        ("think", "<|im_start|>assistant\n<think>\n\n</think>\n\n", ReasoningBlock.CLOSED),
        ("think", "<｜Assistant｜></think>", ReasoningBlock.CLOSED),
        ("think", "<|assistant|>\n<think></think>", ReasoningBlock.CLOSED),
        ("think", "<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n", ReasoningBlock.NOT_BEGUN),
        ("mistral", "[SYSTEM_PROMPT][THINK]so[/THINK][/SYSTEM_PROMPT][INST]Hi[/INST]", ReasoningBlock.NOT_BEGUN),
        ("seed", "<seed:bos>assistant\n<seed:think><seed:cot_budget_reflect>", ReasoningBlock.OPEN),
        ("granite_phrases", "<|start_of_role|>assistant<|end_of_role|>", ReasoningBlock.NOT_BEGUN),
    ],
)
def test_what_the_prompt_has_done(name: str, prompt: str, block: ReasoningBlock) -> None:
    assert FORMATS[name].block(prompt) is block


TEMPLATES: dict[str, tuple[str, str | None, Switch | None]] = {
    "qwen3": (
        chat_templates_for_tests.QWEN3,
        "think",
        Switch(on={"enable_thinking": True}, off={"enable_thinking": False}),
    ),
    "glm": (
        "<|assistant|>{{- '\\n<think></think>' if (enable_thinking is defined and not enable_thinking) else '' -}}",
        "think",
        Switch(on={"enable_thinking": True}, off={"enable_thinking": False}),
    ),
    "deepseek v3.1": (
        "{% if not thinking is defined %}{% set thinking = false %}{% endif %}{% if not thinking %}</think>{% endif %}",
        "think",
        Switch(on={"thinking": True}, off={"thinking": False}),
    ),
    "deepseek r1": (
        "{% set content = content.split('</think>')[-1] %}{{ '<｜Assistant｜><think>\\n' }}",
        "think",
        None,
    ),
    "nemotron": (
        "{% set enable_thinking = true %}{% if not enable_thinking %}<think></think>{% endif %}",
        "think",
        None,
    ),
    "magistral": (
        "{% set text = 'Your thinking: [THINK]Your thoughts[/THINK]' %}{{ block['thinking'] + block.thinking }}",
        "mistral",
        None,
    ),
    "mistral small 4": (
        "{% if reasoning_effort not in ['none', 'high'] %}{% endif %}{{ '[THINK]' + b['thinking'] + '[/THINK]' }}",
        "mistral",
        Switch(on={"reasoning_effort": "high"}, off={"reasoning_effort": "none"}),
    ),
    "seed": (
        "{%- set think_end_token = '</seed:think>' -%}{% if not thinking_budget is defined %}{% endif %}",
        "seed",
        Switch(on={"thinking_budget": -1}, off={"thinking_budget": 0}),
    ),
    "command a reasoning": (
        "{% set reasoning = reasoning | default(true) %}{% if not reasoning %}<|START_THINKING|><|END_THINKING|>"
        "{% endif %}<|START_RESPONSE|>{{ message.content }}<|END_RESPONSE|>",
        "cohere",
        Switch(on={"reasoning": True}, off={"reasoning": False}),
    ),
    "command a plus": (
        "<|START_THINKING|>{{ m.thinking }}<|END_THINKING|><|START_TEXT|>{{ m.content }}<|END_TEXT|>",
        "cohere_text",
        None,
    ),
    "hunyuan": (
        "{% if '<answer>' in content %}{% set content = content.split('<answer>')[-1] %}{% endif %}"
        "{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n' }}{% endif %}",
        "hunyuan",
        Switch(on={"enable_thinking": True}, off={"enable_thinking": False}),
    ),
    "ernie": (
        "{% set reasoning = m.reasoning %}{{ '<think>\\n' + reasoning + '\\n</think>\\n' }}"
        "{{ '<response>\\n' + content + '\\n</response>\\n' }}",
        "ernie",
        None,
    ),
    "apertus": (
        "{% set inner_token, outer_token = '<|inner_prefix|>', '<|inner_suffix|>' %}"
        "{% if enable_thinking is defined and enable_thinking %}enabled{% endif %}",
        "apertus",
        Switch(on={"enable_thinking": True}, off={"enable_thinking": False}),
    ),
    "granite 3.3": (
        "{% elif thinking %}{% set s = 'Write your thoughts between <think></think> and your response between"
        " <response></response> for each user query.' %}",
        "granite",
        Switch(on={"thinking": True}, off={"thinking": False}),
    ),
    "granite 3.2": (
        "{% elif thinking %}{% set s = \"Write your thoughts after 'Here is my thought process:' and\" %}",
        "granite_phrases",
        Switch(on={"thinking": True}, off={"thinking": False}),
    ),
    "namespace": ("{% set ns = namespace(thinking=true) %}{% if ns.thinking %}{% endif %}", None, None),
    "gpt-oss": ("{{ 'Reasoning: ' + reasoning_effort + '\\n' }}", None, None),
    "chatml": (chat_templates_for_tests.CHATML, None, None),
}


@pytest.mark.parametrize("case", TEMPLATES)
def test_what_a_template_says(case: str) -> None:
    template, name, switch = TEMPLATES[case]
    format = reasoning.reasoning_format(template)
    assert (format and format.name) == name
    assert reasoning.reasoning_switch(template) == switch
