"""Calls of tools as the OpenAI SDK asks for them and reads them; the demo model fills them with anything."""

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.lib.streaming.chat import FunctionToolCallArgumentsDoneEvent
from pydantic import BaseModel, Field

from tests.end_to_end.conftest import LiveServer
from tests.engine.guidance.demo import TOKENIZER

MODEL = "weft-demo"
ASK: Any = [{"role": "user", "content": "What is the weather?"}]
OPEN_CALL = TOKENIZER.token_to_id("<tool_call>")
"""Made likely or impossible where a test is not about what the model likes."""
SETTINGS: Any = {"model": MODEL, "messages": ASK, "temperature": 1.0, "seed": 7, "max_tokens": 300}


class Weather(BaseModel):
    """The weather of a place."""

    city: str = Field(max_length=8)
    days: int = Field(ge=1, le=9)


class Note(BaseModel):
    """Something to keep."""

    words: list[str] = Field(max_length=2)
    is_urgent: bool


class Person(BaseModel):
    """Somebody."""

    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=99)


TOOLS: Any = [openai.pydantic_function_tool(Weather), openai.pydantic_function_tool(Note)]
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": Weather.model_json_schema()}}
TIME: Any = {"type": "function", "function": {"name": "time", "description": "What time it is."}}
NAMED_WEATHER: Any = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
def client(live_server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live_server.base_url}/v1", api_key="none", max_retries=0) as sdk:
        yield sdk


def streamed(client: openai.OpenAI, **body: Any) -> dict[str, Any]:
    """The message that the chunks make, with a rule of the wire checked: what names a call is sent once."""
    calls: dict[int, dict[str, Any]] = {}
    message: dict[str, Any] = {"content": ""}
    for chunk in client.chat.completions.create(**{**SETTINGS, **body}, stream=True):
        (choice,) = chunk.choices
        message["content"] += choice.delta.content or ""
        message["finish_reason"] = choice.finish_reason
        for part in choice.delta.tool_calls or []:
            is_first = part.index not in calls
            assert (part.id is not None) == (part.type is not None) == is_first
            assert part.function is not None and (part.function.name is not None) == is_first
            call = calls.setdefault(part.index, {"name": part.function.name, "arguments": ""})
            call["arguments"] += part.function.arguments or ""
    return {**message, "calls": [calls[i] for i in range(len(calls))]}


def plain(client: openai.OpenAI, **body: Any) -> dict[str, Any]:
    (choice,) = client.chat.completions.create(**{**SETTINGS, **body}).choices
    calls = [call.function.model_dump() for call in choice.message.tool_calls or []]
    assert len({call.id for call in choice.message.tool_calls or []}) == len(calls)
    return {"content": choice.message.content or "", "finish_reason": choice.finish_reason, "calls": calls}


# --- what is asked for ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"weather", "time"}),
        (NAMED_WEATHER, {"weather"}),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED_WEATHER]}}, {"weather"}),
    ],
    ids=["required", "named", "allowed"],
)
@pytest.mark.parametrize("seed", range(4))
def test_a_call_that_must_come_comes_and_is_valid(
    client: openai.OpenAI, choice: Any, names: set[str], seed: int
) -> None:
    asked = {"tools": [WEATHER, TIME], "tool_choice": choice, "parallel_tool_calls": False, "seed": seed}
    message = plain(client, **asked)
    assert message["finish_reason"] == "tool_calls"
    assert message["content"] == ""
    (call,) = message["calls"]
    assert call["name"] in names
    assert call["arguments"] == "{}" if call["name"] == "time" else Weather.model_validate_json(call["arguments"])
    assert streamed(client, **asked) == message


def test_auto_answers_in_words_until_the_model_opens_a_call(client: openai.OpenAI) -> None:
    words = plain(client, tools=[WEATHER], tool_choice="auto", logit_bias={OPEN_CALL: -100})
    assert words["calls"] == []
    assert words["finish_reason"] in ("stop", "length")
    assert words["content"]


@pytest.mark.parametrize("lure", [100, -100])
def test_auto_takes_the_structure_or_a_call_as_the_model_likes(client: openai.OpenAI, lure: int) -> None:
    asked = {"tools": [WEATHER], "tool_choice": "auto", "parallel_tool_calls": False, "logit_bias": {OPEN_CALL: lure}}
    asked["extra_body"] = {"structured_outputs": {"choice": ["nothing", "never"]}}
    message = plain(client, **asked)
    if lure > 0:
        (call,) = message["calls"]
        assert (call["name"], message["content"], message["finish_reason"]) == ("weather", "", "tool_calls")
        assert Weather.model_validate_json(call["arguments"])
    else:
        assert (message["calls"], message["finish_reason"]) == ([], "stop")
        assert message["content"] in ("nothing", "never")
    assert streamed(client, **asked) == message


def test_none_calls_nothing(client: openai.OpenAI) -> None:
    message = plain(client, tools=[WEATHER], tool_choice="none")
    assert message["calls"] == []
    assert message["finish_reason"] in ("stop", "length")


def test_a_tool_with_a_schema_beyond_grammars_is_callable_unless_it_is_strict(client: openai.OpenAI) -> None:
    """It was refused with 400, although nobody had asked that it be enforced."""
    parameters = {"type": "object", "properties": {"a": {"enum": [1, 2], "not": {"const": 2}}}, "required": ["a"]}
    function = {"name": "f", "parameters": parameters}
    asked = {"tool_choice": "required", "parallel_tool_calls": False}
    (call,) = plain(client, tools=[{"type": "function", "function": function}], **asked)["calls"]
    assert json.loads(call["arguments"])["a"] in (1, 2)
    with pytest.raises(openai.BadRequestError) as error:
        plain(client, tools=[{"type": "function", "function": {**function, "strict": True}}], **asked)
    assert (error.value.code, error.value.param) == ("invalid_json_schema", "tools[0].function.parameters")


def test_custom_tools_take_text_that_follows_their_regex(client: openai.OpenAI) -> None:
    grammar = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[a-z]{2,4}-[0-9]"}}
    tools: Any = [{"type": "custom", "custom": {"name": "code", "format": grammar}}]
    answer = client.chat.completions.create(
        **SETTINGS, tools=tools, tool_choice={"type": "custom", "custom": {"name": "code"}}
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "custom"
    assert call.custom.name == "code"
    assert re.fullmatch("[a-z]{2,4}-[0-9]", call.custom.input)


def test_functions_as_they_were_before_tools(client: openai.OpenAI) -> None:
    asked: Any = {"functions": [WEATHER["function"], TIME["function"]], "function_call": {"name": "weather"}}
    (choice,) = client.chat.completions.create(**SETTINGS, **asked).choices
    assert choice.finish_reason == "function_call"
    assert choice.message.tool_calls is None
    assert choice.message.function_call is not None and choice.message.function_call.name == "weather"
    assert Weather.model_validate_json(choice.message.function_call.arguments)


def test_a_second_turn_takes_the_calls_and_their_results(client: openai.OpenAI) -> None:
    asked: Any = {"tools": [WEATHER, TIME], "tool_choice": "required", "parallel_tool_calls": False}
    message = client.chat.completions.create(**SETTINGS, **asked).choices[0].message
    (call,) = message.tool_calls or []
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "It snows."}
    turn: Any = [*ASK, message.model_dump(exclude_none=True), result]
    second = {**SETTINGS, "messages": turn, "tools": [WEATHER, TIME]}
    answer = client.chat.completions.create(**second, extra_body={"return_prompt_text": True})
    assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")
    prompt = str((answer.model_extra or {})["prompt_text"])
    assert call.function.arguments in prompt
    assert prompt.index(call.function.name) < prompt.index("It snows.")


# --- the helpers of the SDK -----------------------------------------------------------------------------------------


def test_parse_gives_the_object_that_was_asked_for(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(**SETTINGS, response_format=Person)
    assert isinstance(answer.choices[0].message.parsed, Person)


def test_parse_gives_the_arguments_of_calls(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        **SETTINGS, tools=TOOLS[:1], tool_choice="required", parallel_tool_calls=False
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Weather)


def test_the_streaming_helper_follows_a_structured_answer(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(**SETTINGS, response_format=Person) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert {"content.delta", "content.done"} <= set(kinds)
    plainly = client.chat.completions.parse(**SETTINGS, response_format=Person)
    assert final.choices[0].message.parsed == plainly.choices[0].message.parsed


def test_the_streaming_helper_follows_calls(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        **SETTINGS, tools=TOOLS[:1], tool_choice="required", parallel_tool_calls=False
    ) as stream:
        done = [event for event in stream if isinstance(event, FunctionToolCallArgumentsDoneEvent)]
        (choice,) = stream.get_final_completion().choices
    assert choice.finish_reason == "tool_calls"
    (event,) = done
    assert isinstance(event.parsed_arguments, Weather)
    assert [call.function.parsed_arguments for call in choice.message.tool_calls or []] == [event.parsed_arguments]
