"""One conversation open in two tabs of the chat page: whatever is said in either, nothing of it is lost."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from tests.end_to_end.browser import CHAT, STORED, TIMEOUT_MS, Tab, chunk, say, stream, text_answer
from tests.end_to_end.conftest import LiveServer

DEAF = "if (sessionStorage.deaf) BroadcastChannel.prototype.addEventListener = () => {}"
"""A tab that does not hear of others: as it is for the moment that an event takes."""


def answer(route: Route) -> None:
    """Repeat what was said last."""
    said = [message["content"] for message in route.request.post_data_json["messages"] if message["role"] == "user"]
    route.fulfill(**text_answer(f"answer to {said[-1]}"))


class Held:
    """A request of a tab that is answered when the test says so."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.routes: list[Route] = []
        page.route(CHAT, self.hold)

    def hold(self, route: Route) -> None:
        self.routes.append(route)

    def ask(self, text: str) -> None:
        self.page.fill("#input", text)
        with self.page.expect_request(CHAT):
            self.page.press("#input", "Enter")

    def finish(self) -> None:
        while not self.routes:  # it was sent, and is on its way here
            self.page.wait_for_timeout(10)
        answer(self.routes[0])
        self.page.wait_for_selector("#send:visible")
        self.page.unroute(CHAT, self.hold)


@pytest.fixture
def other(tab: Tab, page: Page, live_server: LiveServer) -> Iterator[Page]:
    """A second tab, beside `page`; both answer by themselves."""
    for one in (page, other := tab.context.new_page()):
        one.route(CHAT, answer)
    other.set_default_timeout(TIMEOUT_MS)
    other.goto(live_server.base_url)
    yield other
    other.unroute_all(behavior="ignoreErrors")
    other.close()


def join(page: Page, other: Page, text: str = "one") -> None:
    """Begin a conversation in one tab, and open it in the other."""
    say(page, text)
    other.click(".conversations .open")
    expect(other.locator(".bubble")).to_have_text([text])


def said(page: Page) -> list[tuple[str, str]]:
    """Questions and answers of the one conversation that is stored."""
    (conversation,) = page.evaluate(STORED)
    contents = [message["content"] for message in conversation["messages"]]
    return list(zip(contents[::2], contents[1::2], strict=True))


def turns(*texts: str) -> list[tuple[str, str]]:
    return [(text, f"answer to {text}") for text in texts]


def expect_turns(page: Page, *texts: str) -> None:
    expect(page.locator(".bubble")).to_have_text(list(texts))
    expect(page.locator(".answer .content")).to_have_text([f"answer to {text}" for text in texts])


def test_what_two_tabs_say_in_turns_is_kept_and_shown_in_both(page: Page, other: Page) -> None:
    """The tab that wrote last had the conversation to itself: turns of the other were gone."""
    join(page, other)
    say(page, "two")
    expect_turns(other, "one", "two")
    say(other, "three")
    expect_turns(page, "one", "two", "three")
    say(page, "four")
    expect_turns(other, "one", "two", "three", "four")
    assert said(page) == turns("one", "two", "three", "four")


def test_turns_that_run_at_the_same_time_are_both_kept(page: Page, other: Page) -> None:
    join(page, other)
    held = Held(page)
    held.ask("two")
    say(other, "three")
    expect(page.locator("#stop")).to_be_visible()  # it streams on
    held.finish()
    for tab in (page, other):
        expect_turns(tab, "one", "two", "three")
        tab.reload()
        expect_turns(tab, "one", "two", "three")
    assert said(page) == turns("one", "two", "three")


def test_nothing_is_lost_by_tabs_that_have_not_heard_of_each_other(page: Page, other: Page) -> None:
    join_by_reload(page, other)
    for one, text in ((page, "two"), (other, "three"), (page, "four"), (other, "five")):
        say(one, text)
    assert said(page) == turns("one", "two", "three", "four", "five")


def join_by_reload(page: Page, other: Page) -> None:
    """Open it in a tab that hears nothing, before and after."""
    for one in (page, other):
        one.add_init_script(DEAF)
        one.evaluate("sessionStorage.deaf = true")
        one.reload()
    say(page, "one")
    other.reload()
    other.click(".conversations .open")


def test_an_edited_message_stands_beside_the_old_one_and_what_came_meanwhile_follows_it(
    page: Page, other: Page
) -> None:
    join(page, other, "frist")
    page.get_by_role("button", name="Edit message").click()
    say(other, "second")  # while it is being edited
    expect(page.locator("#input")).to_have_value("frist")
    say(page, "first")
    regenerate(other)
    expect_turns(page, "first")
    for one in (page, other):
        expect(one.locator(".user .switch")).to_have_text("2/2")
        expect(one.locator(".answer .switch")).to_have_text("2/2")
    page.get_by_role("button", name="Previous version").first.click()
    for one in (page, other):
        expect_turns(one, "frist", "second")


def test_an_edit_that_has_not_heard_of_a_new_turn_takes_it_along(page: Page, other: Page) -> None:
    join_by_reload(page, other)
    say(other, "two")
    page.get_by_role("button", name="Edit message").click()
    say(page, "One")
    expect_turns(page, "One", "two")
    say(other, "three")
    assert said(page) == turns("One", "two", "three")


def regenerate(page: Page) -> None:
    page.get_by_role("button", name="Regenerate").last.click()
    page.wait_for_selector("#send:visible")


def test_a_name_given_in_one_tab_outlives_a_turn_in_the_other(page: Page, other: Page) -> None:
    join(page, other)
    held = Held(page)
    held.ask("two")
    other.get_by_role("button", name="Rename one").click()
    other.keyboard.type("Renamed")
    other.keyboard.press("Enter")
    held.finish()
    for one in (page, other):
        expect(one.locator("#title")).to_have_text("Renamed")
    assert said(page) == turns("one", "two")


def test_a_conversation_deleted_in_one_tab_is_gone_in_both(page: Page, other: Page) -> None:
    join(page, other)
    page.fill("#input", "not sent yet")
    other.once("dialog", lambda dialog: dialog.accept())
    other.get_by_role("button", name="Delete one").click()
    expect(page.locator(".card")).to_have_count(6)
    expect(page.locator("#input")).to_have_value("not sent yet")
    assert page.evaluate(STORED) == []


def test_what_is_being_typed_stays(page: Page, other: Page) -> None:
    """A result for a call, and a new title, are fields inside of what another tab's turn would show anew."""
    join(page, other)
    call: dict[str, Any] = {"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "f", "arguments": "{}"}}]}
    page.unroute(CHAT)
    page.route(CHAT, lambda route: route.fulfill(**stream(chunk(call), chunk({}, "tool_calls"))))
    say(page, "call it")
    page.fill(".call textarea", "half a resu")
    page.get_by_role("button", name="Rename one").click()
    page.keyboard.type("half a tit")
    say(other, "meanwhile")
    expect(page.locator(".bubble")).to_have_text(["one", "call it", "meanwhile"])
    expect(page.locator(".call textarea")).to_have_value("half a resu")
    page.keyboard.press("Enter")
    expect(page.locator("#title")).to_have_text("half a tit")
    page.unroute(CHAT)
    page.route(CHAT, answer)
    page.click("text=Send result")
    expect(page.locator(".bubble")).to_have_text(["one", "call it", "meanwhile"])
    (conversation,) = page.evaluate(STORED)
    roles = [message["role"] for message in conversation["messages"]]
    assert roles == ["user", "assistant", "user", "assistant", "tool", "assistant", "user", "assistant"]


OLDER = """messages => localStorage.setItem("weft:conversation:c1", JSON.stringify(
    { id: "c1", title: "one", time: 1700000000000, messages }))"""


@pytest.mark.parametrize("is_named", [False, True])
def test_conversations_of_an_older_page_are_taken_over_and_merged_as_well(
    page: Page, other: Page, is_named: bool
) -> None:
    """They were lists in another storage, the oldest without names of turns."""
    texts = ("one", "two")
    messages: list[dict[str, Any]] = []
    for text in texts:
        name = {"turn": f"lq3x8zk{text}"} if is_named else {}
        messages += [
            {"role": "user", "content": text, **name},
            {
                "role": "assistant",
                "content": f"answer to {text}",
                "reasoning": "",
                "calls": [],
                "tokens": [],
                "stats": {},
            },
        ]
    page.evaluate(OLDER, messages)
    for one in (page, other):
        one.reload()
        one.click(".conversations .open")
        expect_turns(one, *texts)
    assert page.evaluate("Object.keys(localStorage).filter(name => name.includes('conversation'))") == []
    regenerate(page)
    say(other, "three")
    say(page, "four")
    assert said(page) == turns(*texts, "three", "four")


@pytest.mark.parametrize("is_deaf", [False, True])
def test_whatever_two_tabs_do_every_turn_is_kept(page: Page, other: Page, is_deaf: bool) -> None:
    chance = random.Random(int(is_deaf))
    if is_deaf:
        join_by_reload(page, other)
    else:
        join(page, other)
    expected = ["one"]
    for number in range(10):
        one = chance.choice((page, other))
        if chance.random() < 0.3:
            regenerate(one)
        else:
            expected.append(f"turn {number}")
            say(one, expected[-1])
        if not is_deaf:
            expect_turns(page, *expected)
            expect_turns(other, *expected)
    assert said(page) == turns(*expected)
