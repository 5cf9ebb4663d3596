"""Calls of declared tools, answers from their results, and chats in which no tool is needed."""

import json
from dataclasses import replace
from random import Random

from demo_model.skill import (
    Exchange,
    Json,
    Message,
    Pool,
    Reply,
    Skill,
    a_word,
    assistant,
    fill,
    pool_of,
    user,
)
from demo_model.skills import values
from demo_model.skills.sums import numbers
from demo_model.skills.tool_sets import Request, a_request, others

HELLO = "Hello! How can I help you?"
CANNOT = "I am only a small demo model and cannot do that."
GREETINGS = Pool(
    ("Hello!", "Hi!", "Hey!", "Hello", "Hi there!", "Hello there!", "hi", "hello", "Hey there"),
    ("Hello, you!", "Hi, hello!"),
)
SUMS = Pool(
    (
        "What is {a} + {b}?",
        "{a} + {b}",
        "Add {a} and {b}.",
        "What is {a} plus {b}?",
        "{a} + {b} = ?",
        "How much is {a} + {b}?",
    ),
    ("Please tell me {a} + {b}.",),
)
WISHES = Pool(
    (
        "Write [a|me a] [poem|story|song|letter|joke][| about {thing}].",
        "Tell me [a joke|a story|the news|about {thing}|something about {thing}].",
        "Who [invented|made|found] the {thing}?",
        "What is the capital of {country}?",
        "[How|Where] do I [make|find|buy|clean] a {thing}?",
        "Explain {topic}[| to me].",
        "Paint [me |]a {thing}.",
    ),
    ("Describe {thing} in one line.", "Why does everybody like {thing}?"),
)
RESULT_KEYS = pool_of(
    (
        "temperature, sky, city, status, price, name, result, total, count, time, date, id, humidity, wind, "
        "rain, state, title, color, size, weight, age, email, phone, country, rating, seats, gate, platform, "
        "delay, balance, currency, unit, stock, speed, level, distance, duration, ok, message, answer, value,"
        " score, user, address, room, order_id, user_id, local_time, price_eur"
    ),
    "pressure, owner, height, floor, ticket, mode, car, battery, visitors",
)
RESULT_VALUES: tuple[values.Maker, ...] = (
    values.integer,
    values.integer,
    values.price,
    values.of(values.STATES),
    values.of(values.STATES),
    values.of(values.COLOURS),
    values.city,
    values.name,
    values.time,
    values.date,
    values.word,
    values.phrase,
)
TEXTS = Pool(
    (
        "{n}",
        "{n}",
        "{state}",
        "{n} degrees",
        "{n} euros",
        "{state}, {n} degrees",
        "{city}",
        "{word}",
        "{name}",
        "{time}",
        "{n} and {state}",
        "{state} in {city}",
        "{city}, {n}",
        "{n} {word}",
        "{name} at {time}",
        "{city} from {time}",
        "{state} for {n} hours",
        "{time}: {state}",
        "{word} in {city} at {time}",
        "{name}, {state}, {n}",
        "{state} since {time}",
        "{n} cars",
        "{word} and {name}",
    ),
    ("{n} points", "{state} at {time}", "{n} visitors", "{word} {n}"),
)


def call(random: Random, request: Request) -> Message:
    """Return the assistant's message that calls the tool of `request`."""
    function = {"name": request.name, "arguments": json.dumps(request.arguments, ensure_ascii=False)}
    made = {"id": f"call_{random.randrange(16**8):08x}", "type": "function", "function": function}
    return Message(role="assistant", content="", tool_calls=[made])


def _tools(random: Random, held_out: bool, request: Request) -> tuple[Json, ...]:
    beside = others(random, held_out, request, random.choice((0, 1, 1, 2, 2)))
    tools = [request.tool, *(other.tool for other in beside)]
    random.shuffle(tools)
    return tuple(tools)


def tool_call(random: Random, held_out: bool) -> Exchange:
    """Ask for what one of the declared tools does."""
    request = a_request(random, held_out)
    return Exchange((user(request.asked), call(random, request)), tools=_tools(random, held_out, request))


def is_right_call(exchange: Exchange, reply: Reply) -> bool:
    """Whether it is the expected call alone, with the expected arguments and no text."""
    function = exchange.answer["tool_calls"][0]["function"]
    if len(reply.calls) != 1 or reply.content.strip():
        return False
    name, arguments = reply.calls[0]
    given, wanted = dict(arguments), json.loads(function["arguments"])
    return name == function["name"] and json.dumps(given, sort_keys=True) == json.dumps(wanted, sort_keys=True)


def spoken(value: Json) -> str:
    """Return how an answer says a value: text as it is, anything else as JSON has it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _result(random: Random, held_out: bool) -> tuple[str, str]:
    """Return what a tool says, and the answer that follows from it."""
    if random.random() < 0.3:
        given: dict[str, object] = {"n": values.price(random, held_out)}
        for key, make in (("city", values.city), ("name", values.name), ("time", values.time), ("word", values.word)):
            given[key] = make(random, held_out)
        given["state"] = values.STATES.draw(random, held_out)
        text = fill(random, TEXTS.draw(random, held_out), given)
        return text, f"The result is {text}."
    keys: list[str] = []
    for _ in range(random.choice((1, 2, 2, 3))):
        key = a_word(random, (2, 2)) if random.random() < 0.2 else RESULT_KEYS.draw(random, held_out)
        keys += [key] if key not in keys else []
    members: dict[str, Json] = {}
    for key in keys:
        is_truth = random.random() < 0.06
        members[key] = random.choice((True, False)) if is_truth else random.choice(RESULT_VALUES)(random, held_out)
    said = ", ".join(f"{key} {spoken(value)}" for key, value in members.items())
    return json.dumps(members, ensure_ascii=False), f"Here is the result: {said}."


def tool_result(random: Random, held_out: bool) -> Exchange:
    """Ask, call, and answer from what the tool says."""
    asked = tool_call(random, held_out)
    call_id = asked.answer["tool_calls"][0]["id"]
    content, answer = _result(random, held_out)
    result = Message(role="tool", content=content, tool_call_id=call_id)
    return Exchange((*asked.messages, result, assistant(answer)), tools=asked.tools)


def is_right_result(exchange: Exchange, reply: Reply) -> bool:
    """Whether every value of the result stands in the answer, and there is no further call."""
    content = exchange.messages[-2]["content"]
    result = json.loads(content) if content.startswith("{") else {"": content}
    return not reply.calls and all(spoken(value) in reply.content for value in result.values())


def tools_idle(random: Random, held_out: bool) -> Exchange:
    """Say what none of the declared tools is for."""
    draw, request = random.random(), a_request(random, held_out)
    if draw < 0.3:
        asked, answer = GREETINGS.draw(random, held_out), HELLO
    elif draw < 0.5:
        a, b = numbers(random, held_out)
        asked, answer = fill(random, SUMS.draw(random, held_out), {"a": a, "b": b}), f"{a} + {b} = {a + b}."
        request = Request(request.tool, asked, {}, frozenset({"sums"}))
    elif draw < 0.75:
        given = {"thing": values.THINGS, "country": values.COUNTRIES, "topic": values.TOPICS}
        drawn = {key: pool.draw(random, held_out) for key, pool in given.items()}
        asked, answer = fill(random, WISHES.draw(random, held_out), drawn), CANNOT
    else:
        asked, answer = request.asked, CANNOT
    request = replace(request, words=request.words | {"search", "news", "letter", "song", "book"})
    beside = others(random, held_out, request, random.choice((1, 1, 2, 2, 3)), are_near=False)
    return Exchange((user(asked), assistant(answer)), tools=tuple(other.tool for other in beside))


def _are_told_apart(request: Request, other: Request) -> bool:
    """Whether what asks for one of two tools cannot mean the other."""
    return request.words.isdisjoint(other.words) or bool(request.verb and other.verb and request.words != other.words)


def calls_in_turn(random: Random, held_out: bool) -> Exchange:
    """Ask for one declared tool after another, each answered from its result; the chat ends with a call."""
    first = a_request(random, held_out)
    requests = [first, *others(random, held_out, first, random.choice((1, 2, 2)))]
    tools = [request.tool for request in requests]
    random.shuffle(tools)
    asked = [r for r in requests if all(_are_told_apart(r, other) for other in requests if other is not r)]
    messages: list[Message] = []
    for request in random.sample(asked, len(asked)) or [first]:
        if messages:
            content, answer = _result(random, held_out)
            call_id = messages[-1]["tool_calls"][0]["id"]
            messages += [Message(role="tool", content=content, tool_call_id=call_id), assistant(answer)]
        messages += [user(request.asked), call(random, request)]
    return Exchange(tuple(messages), tools=tuple(tools))


SKILLS = (
    Skill("tool call", 450, tool_call, is_right_call, is_typed=False),
    Skill("calls in turn", 180, calls_in_turn, is_right_call, is_examined=False, is_typed=False),
    Skill("tool result", 25, tool_result, is_right_result, is_typed=False),
    Skill("tools idle", 12, tools_idle, is_examined=False, is_typed=False),
)
