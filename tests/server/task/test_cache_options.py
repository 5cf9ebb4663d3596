from typing import Any

import pytest

from weft.engine.wire.messages import CachePolicy, Pin
from weft.server.task.request_options import Breakpoint, find_pins, marked


def chat(*parts: Any, **body: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}, {"role": "assistant", "content": "x"}], **body}


def part(text: str, **breakpoint_: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **({"prompt_cache_breakpoint": breakpoint_} if breakpoint_ else {})}


@pytest.mark.parametrize(
    ("options", "policy"),
    [
        (None, CachePolicy()),
        ({}, CachePolicy()),
        ({"mode": "implicit", "ttl": "30m"}, CachePolicy()),
        ({"mode": "explicit"}, CachePolicy(is_used=False)),
    ],
)
def test_the_mode_says_whether_the_cache_is_used(site: Any, options: Any, policy: CachePolicy) -> None:
    usage = site.chat(prompt_cache_options=options).json["usage"]
    assert (usage["prompt_tokens_details"]["cache_write_tokens"] > 0) == policy.is_used
    assert site.complete(prompt_cache_options=options).status == 200
    assert {asked.caching for asked in site.engine.asked} == {policy}


def test_a_breakpoint_pins_the_prompt_up_to_the_end_of_its_part(site: Any) -> None:
    parts = [part("first", mode="explicit"), part("second"), part("third", ttl="12h")]
    reply = site.chat(**chat(*parts, prompt_cache_options={"mode": "explicit"}))
    assert reply.status == 200
    assert "x-ignored-params" not in reply.headers
    (asked,) = site.engine.asked
    ends = [1 + len("user: first"), 1 + len("user: first\nsecond\nthird")]
    assert asked.caching == CachePolicy(pins=(Pin(ends[0], 1800.0), Pin(ends[1], 43200.0)))


@pytest.mark.parametrize("kind", ["text", "input_text", "output_text"])
def test_parts_of_every_type_of_text_count_before_a_breakpoint(site: Any, kind: str) -> None:
    """The text of types of other APIs was not counted: the pin ended before it."""
    site.chat(**chat({"type": kind, "text": "first"}, part("second", mode="explicit"), part("third")))
    (pin,) = site.engine.asked[0].caching.pins
    assert pin.num_tokens == 1 + len("user: first\nsecond")


def test_breakpoints_take_the_usual_ttl_and_the_last_four_count(site: Any) -> None:
    parts = [part(f"{i}", mode="explicit") for i in range(6)]
    site.chat(**chat(*parts, prompt_cache_options={"ttl": "12h"}))
    pins = site.engine.asked[0].caching.pins
    assert [pin.num_tokens for pin in pins] == [
        1 + len("user: 0\n1\n2"),
        *(1 + len("user: 0\n1\n2") + 2 * i for i in (1, 2, 3)),
    ]
    assert {pin.ttl_s for pin in pins} == {43200.0}


def test_what_truncation_cuts_off_is_not_pinned(site: Any) -> None:
    body = chat(part("first", mode="explicit"), part("second"))
    site.chat(**body, truncate_prompt_tokens=40)
    num_cut = 1 + len("user: first\nsecond\nassistant: x\nassistant:") - 40
    assert site.engine.asked[0].caching.pins == (Pin(1 + len("user: first") - num_cut, 1800.0),)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt_cache_options": {"ttl": "5m"}}, "prompt_cache_options.ttl"),
        ({"prompt_cache_options": {"mode": "never"}}, "prompt_cache_options.mode"),
        (chat(part("a"), part("b", ttl="1h")), "messages[0].content[1].prompt_cache_breakpoint.ttl"),
        (chat(part("a", mode="implicit")), "messages[0].content[0].prompt_cache_breakpoint.mode"),
    ],
)
def test_unknown_modes_and_times_are_refused(site: Any, body: dict[str, Any], param: str) -> None:
    reply = site.chat(**body)
    assert reply.status == 400
    assert reply.error["param"] == param


def test_the_prompt_is_rendered_once_more_for_all_breakpoints(site: Any) -> None:
    """It was rendered once for each of them, and once for itself."""
    site.chat(**chat(*(part(f"{i}", mode="explicit") for i in range(4))))
    assert site.tokenizer.num_renderings == 2
    assert len(site.engine.asked[0].caching.pins) == 4
    site.tokenizer.num_renderings = 0
    site.chat(**chat(part("a")))
    assert site.tokenizer.num_renderings == 1


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        ("{}", ["first", "first  \nsecond"]),
        ("<{}>", ["<first", "<first  \nsecond"]),
        ("nothing", ["nothing", "nothing"]),  # what the template does not show cannot be found
    ],
)
def test_breakpoints_are_found_where_the_template_strips(template: str, ends: list[str]) -> None:
    messages = [{"role": "user", "content": "first  \nsecond \n"}]
    breakpoints = [Breakpoint(0, len("first  "), 1.0), Breakpoint(0, len("first  \nsecond "), 2.0)]

    def render(given: Any) -> str:
        return template.format(given[0]["content"].strip())

    rendered = render(marked(messages, breakpoints))
    pins = find_pins(breakpoints, list(render(messages).encode()), [rendered], lambda p: list("".join(p).encode()))
    assert pins == [Pin(len(end), float(i)) for i, end in enumerate(ends, 1)]
