import pytest

from weft.server.formats.json_calls import HERMES, KIMI_K2, MISTRAL
from weft.server.formats.parser import ToolFormat
from weft.server.task.bodies import FunctionCall, Message, ToolCall
from weft.server.task.messages import template_messages


def _chat(*ids: str) -> list[Message]:
    function = FunctionCall(name="f", arguments="{}")
    turns = []
    for call_id in ids:
        turns.append(Message(role="assistant", tool_calls=[ToolCall(id=call_id, type="function", function=function)]))
        turns.append(Message(role="tool", tool_call_id=call_id, content="4"))
    return turns


@pytest.mark.parametrize(
    ("tools", "given", "shown"),
    [
        (KIMI_K2, ("call_1", "call_2"), ("functions.f:0", "functions.f:1")),
        (KIMI_K2, ("call_1", "call_1"), ("functions.f:0", "functions.f:1")),
        (KIMI_K2, ("functions.f:3", "functions.f:7"), ("functions.f:3", "functions.f:7")),
        (MISTRAL, ("call_1", "a1B2c3D4e"), ("000000000", "000000001")),
        (MISTRAL, ("a1B2c3D4e",), ("a1B2c3D4e",)),
        (HERMES, ("call_1",), ("call_1",)),
        (None, ("call_1",), ("call_1",)),
    ],
)
def test_ids_of_calls_are_as_the_family_wants_them(
    tools: ToolFormat | None, given: tuple[str, ...], shown: tuple[str, ...]
) -> None:
    """Templates of Mistral refuse other ids, so the second turn of a chat with tools failed."""
    messages = template_messages(_chat(*given), tools)
    assert tuple(message["tool_calls"][0]["id"] for message in messages[::2]) == shown
    assert tuple(message["tool_call_id"] for message in messages[1::2]) == shown


@pytest.mark.parametrize(
    ("answered", "shown"),
    [
        ((None, None), ("a", "b")),
        (("b", None), ("b", "a")),
        ((None, "a"), ("a", "a")),
        ((None, None, None), ("a", "b", None)),
    ],
)
def test_a_result_without_an_id_is_of_the_first_call_without_a_result(
    answered: tuple[str | None, ...], shown: tuple[str | None, ...]
) -> None:
    function = FunctionCall(name="f", arguments="{}")
    calls = [ToolCall(id=call_id, type="function", function=function) for call_id in ("a", "b")]
    turns = [Message(role="tool", tool_call_id=call_id, content="4") for call_id in answered]
    messages = template_messages([Message(role="assistant", tool_calls=calls), *turns])
    assert tuple(message.get("tool_call_id") for message in messages[1:]) == shown


@pytest.mark.parametrize(
    ("answered", "shown"),
    [
        (("f", "g", "f"), ("call_0", "call_1", "call_2")),
        (("g", "f", "f"), ("call_1", "call_0", "call_2")),
        ((None, "g", None), ("call_0", "call_1", "call_2")),
        (("f", "x", None), ("call_0", "call_1", "call_2")),
        ((None, "f", None), ("call_0", "call_2", "call_1")),
    ],
)
def test_a_result_with_a_name_is_of_the_first_call_of_that_name(
    answered: tuple[str | None, ...], shown: tuple[str, ...]
) -> None:
    """Calls without ids had none in the prompt, and templates that match results by ids could not."""
    calls = [ToolCall(function=FunctionCall(name=name, arguments="{}")) for name in ("f", "g", "f")]
    turns = [Message(role="tool", name=name, content="4") for name in answered]
    messages = template_messages([Message(role="assistant", tool_calls=calls), *turns])
    assert [call["id"] for call in messages[0]["tool_calls"]] == ["call_0", "call_1", "call_2"]
    assert tuple(message["tool_call_id"] for message in messages[1:]) == shown
