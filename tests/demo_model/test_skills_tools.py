"""What the demo model is trained on to call tools and to fill schemas."""

import json
import re
from itertools import pairwise
from random import Random
from typing import Any

import jsonschema
import pytest
from jinja2 import Environment

from demo_model.skill import Exchange, Reply, Skill
from demo_model.skills import json_answers, tool_calls
from demo_model.tokenizer import CHAT_TEMPLATE

SKILLS = {skill.name: skill for skill in (*tool_calls.SKILLS, *json_answers.SKILLS)}
EXAMINED = [skill for skill in SKILLS.values() if skill.is_examined]


def made(skill: Skill, number: int, held_out: bool = False) -> list[Exchange]:
    """Return the same exchanges each time."""
    random = Random(f"{skill.name} {held_out}")
    return [skill.make(random, held_out) for _ in range(number)]


def reply_of(message: Any) -> Reply:
    """Return an assistant's message as the server gives it."""
    functions = [call["function"] for call in message.get("tool_calls", [])]
    return Reply(message["content"], "", tuple((f["name"], json.loads(f["arguments"])) for f in functions))


def names_of(exchanges: list[Exchange]) -> set[str]:
    """Return the names of all declared tools."""
    return {tool["function"]["name"] for exchange in exchanges for tool in exchange.tools}


def bare(text: str) -> str:
    """Return `text` without case, punctuation and spacing."""
    return " ".join(re.findall(r"\w+", text.casefold()))


@pytest.mark.parametrize("held_out", [False, True])
@pytest.mark.parametrize("name", SKILLS)
def test_wanted_answers_are_right(name: str, held_out: bool) -> None:
    skill = SKILLS[name]
    exchanges = made(skill, 300, held_out)
    assert all(skill.is_right(exchange, reply_of(exchange.answer)) for exchange in exchanges)
    assert exchanges == made(skill, 300, held_out)
    assert made(skill, 300, not held_out) != exchanges


@pytest.mark.parametrize("name", ["tool call", "tool result", "calls in turn"])
def test_calls_fit_the_declared_parameters_and_copy_what_is_asked(name: str) -> None:
    num_calls = set()
    for exchange in made(SKILLS[name], 400):
        declared = {tool["function"]["name"]: tool["function"]["parameters"] for tool in exchange.tools}
        assert len(declared) == len(exchange.tools) <= 3
        asked = [(before["content"], m) for before, m in pairwise(exchange.messages) if "tool_calls" in m]
        num_calls.add(len(asked))
        for text, message in asked:
            function = message["tool_calls"][0]["function"]
            arguments = json.loads(function["arguments"])
            schema = {**declared[function["name"]], "additionalProperties": False}
            jsonschema.validate(arguments, schema)
            assert [key for key in schema["properties"] if key in arguments] == list(arguments)
            assert all(str(value) in text for value in arguments.values())
    assert num_calls == ({1, 2, 3} if name == "calls in turn" else {1})


def test_answers_fit_the_schema_in_its_order() -> None:
    for exchange in made(SKILLS["schema"], 400):
        answer = json.loads(exchange.answer["content"])
        jsonschema.validate(answer, exchange.schema)
        assert list(answer) == list(exchange.schema["properties"]) == exchange.schema["required"]
        assert json.dumps(answer, ensure_ascii=False) == exchange.answer["content"]


@pytest.mark.parametrize("skill", EXAMINED, ids=lambda skill: skill.name)
def test_what_the_exam_asks_is_not_trained(skill: Skill) -> None:
    trained = made(skill, 3000)
    examined = made(skill, 300, held_out=True)
    assert not {bare(exchange.asked) for exchange in trained} & {bare(exchange.asked) for exchange in examined}
    assert not names_of(trained) & names_of(examined)


def test_values_and_combinations_of_keys_are_kept_for_the_exam() -> None:
    trained, examined = (made(SKILLS["schema"], number, held) for number, held in ((3000, False), (300, True)))
    asked = " ".join(exchange.asked for exchange in trained)
    assert "Paris" in asked
    assert "Helsinki" not in asked
    assert any("Helsinki" in exchange.asked for exchange in examined)
    orders = {tuple(exchange.schema["required"]) for exchange in trained}
    assert not {order for e in examined if len(order := tuple(e.schema["required"])) > 2} & orders


def test_names_of_tools_are_many() -> None:
    assert len(names_of(made(SKILLS["tool call"], 1000))) > 800


def test_idle_tools_are_not_called() -> None:
    exchanges = made(SKILLS["tools idle"], 200)
    assert all(exchange.tools and "tool_calls" not in exchange.answer for exchange in exchanges)
    answers = {re.sub(r"\d+", "0", exchange.answer["content"]) for exchange in exchanges}
    assert answers == {tool_calls.HELLO, tool_calls.CANNOT, "0 + 0 = 0."}


def test_wrong_calls_are_marked_wrong() -> None:
    is_right = SKILLS["tool call"].is_right
    exchange = next(
        e for e in made(SKILLS["tool call"], 50) if "city" in e.answer["tool_calls"][0]["function"]["arguments"]
    )
    name, arguments = reply_of(exchange.answer).calls[0]
    call = (name, arguments)
    assert is_right(exchange, Reply("\n", "", (call,)))
    wrong = [(), (call, call), ((name, {}),), ((f"{name}s", arguments),), ((name, {**arguments, "city": "Pari"}),)]
    assert not any(is_right(exchange, Reply("", "", calls)) for calls in wrong)
    assert not is_right(exchange, Reply("Let me see.", "", (call,)))


def test_wrong_types_are_marked_wrong() -> None:
    exchange = next(
        e for e in made(SKILLS["tool call"], 50) if '": 1' in e.answer["tool_calls"][0]["function"]["arguments"]
    )
    name, arguments = reply_of(exchange.answer).calls[0]
    as_text = {key: str(value) for key, value in arguments.items()}
    assert not SKILLS["tool call"].is_right(exchange, Reply("", "", ((name, as_text),)))


def test_an_answer_without_a_value_of_the_result_is_marked_wrong() -> None:
    for exchange in made(SKILLS["tool result"], 20):
        right = exchange.answer["content"]
        assert SKILLS["tool result"].is_right(exchange, Reply(f"Sure. {right}"))
        assert not SKILLS["tool result"].is_right(exchange, Reply("Here is the result."))
        assert not SKILLS["tool result"].is_right(exchange, Reply(right, "", (("again", {}),)))


def test_wrong_json_is_marked_wrong() -> None:
    for exchange in made(SKILLS["schema"], 20):
        content = exchange.answer["content"]
        answer = json.loads(content)
        assert SKILLS["schema"].is_right(exchange, Reply(json.dumps(answer, indent=1)))
        for wrong in ("", content[:-1], "{}", json.dumps(dict.fromkeys(answer, "Ann")), f"Here: {content}"):
            assert not SKILLS["schema"].is_right(exchange, Reply(wrong))


def test_the_template_shows_a_tool_as_its_call() -> None:
    properties = {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["c", "f"]}, "x": {}}
    parameters = {"type": "object", "properties": properties, "required": ["city", "x"]}
    tools = [
        {
            "type": "function",
            "function": {"name": "get_weather", "description": "The weather.", "parameters": parameters},
        },
        {"type": "function", "function": {"name": "now"}},
    ]
    call = {"function": {"name": "now", "arguments": "{}"}}
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None, "tool_calls": [call, call]}]
    assert Environment().from_string(CHAT_TEMPLATE).render(tools=tools, messages=messages).split("<|im_end|>\n") == [
        "<|im_start|>system\nTools:\nThe weather.\n"
        '{"name": "get_weather", "arguments": {"city": "string", "days"?: integer, "unit"?: ["c", "f"], "x": any}}\n'
        '{"name": "now", "arguments": {}}',
        "<|im_start|>user\nHi",
        "<|im_start|>assistant\n</think>"
        + "\n".join(['<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'] * 2),
        "",
    ]
