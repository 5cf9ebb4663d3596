"""A full context is no dead end: it is measured, its oldest turns can be left out or summarised, and that be undone."""

import re
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from tests.end_to_end.browser import say, script, text_answer

SIZE = 50


@pytest.fixture
def small(page: Page) -> Page:
    """The page of a model with a context of `SIZE` tokens."""

    def shrink(route: Route) -> None:
        route.fulfill(json={**route.fetch().json(), "max_model_len": SIZE})

    page.route("**/stats", shrink)
    page.reload()
    expect(page.locator("#dot.good")).to_be_visible()
    return page


def contents(body: dict[str, Any]) -> list[str]:
    return [message["content"] for message in body["messages"]]


def test_the_oldest_turns_are_left_out_and_sent_again(small: Page) -> None:
    bodies = script(small, *(text_answer(f"answer {i}") for i in range(5)))
    for text in ("one", "two", "three"):
        say(small, text)
    expect(small.locator("#measured")).to_have_text(re.compile(rf"\d+ of {SIZE} tokens"))
    notice = small.locator("#context")
    expect(notice).to_be_visible()
    small.click("text=Leave out the oldest turns")
    expect(small.locator(".cut")).to_contain_text("left out")
    expect(notice).to_be_hidden()
    expect(small.locator(".bubble")).to_have_text(["one", "two", "three"])  # still there
    expect(small.locator(".unsent")).not_to_have_count(0)
    small.reload()
    say(small, "four")
    assert contents(bodies[3])[-1] == "four" and "one" not in contents(bodies[3])
    small.click("text=Send it again")
    expect(small.locator(".cut")).to_have_count(0)
    say(small, "five")
    assert contents(bodies[4])[::2] == ["one", "two", "three", "four", "five"]


def test_the_oldest_turns_are_summarised(small: Page) -> None:
    texts = ("answer 0", "answer 1", "It was about numbers.", "answer 3")
    bodies = script(small, *map(text_answer, texts))
    say(small, "one " * 20)
    say(small, "two")
    small.click("text=Summarise them")
    expect(small.locator(".cut")).to_contain_text("It was about numbers.")
    (asked,) = contents(bodies[2])
    assert re.match(r"Summarise .*\n\n.*assistant: answer 0", asked, re.DOTALL)
    assert len(asked) < 300  # what is summarised has to fit, too
    say(small, "three")
    assert [message["role"] for message in bodies[3]["messages"]][-1] == "user"
    assert contents(bodies[3])[0].startswith("Summary of what was said before:\nIt was about numbers.\n\n")
    assert not any("one one" in content for content in contents(bodies[3]))


def test_a_message_that_is_too_long_is_told_before_it_is_sent(small: Page) -> None:
    small.fill("#input", "word " * 200)
    notice = small.locator("#context")
    expect(notice).to_contain_text("does not fit into the context. Shorten the message.")
    small.fill("#input", "word")
    expect(notice).to_be_hidden()
    expect(small.locator("#measure")).to_be_visible()
    small.fill("#input", "")
    expect(small.locator("#measure")).to_be_hidden()


def test_a_text_that_is_not_even_counted_is_told_as_well(page: Page) -> None:
    """The server counts four times its context, and refuses the rest."""
    refusal = {"error": {"message": "messages must have at most 65536 tokens", "code": "invalid_value"}}
    page.route("**/tokenize", lambda route: route.fulfill(status=400, json=refusal))
    page.fill("#input", "word")
    expect(page.locator("#context")).to_contain_text("messages must have at most 65536 tokens")
    expect(page.locator("#measured")).to_have_text("more than 98,304 tokens")
