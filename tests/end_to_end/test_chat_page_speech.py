"""What is spoken into the chat page becomes text in its field: a fake microphone, the real route and decoder."""

import re
from array import array
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.end_to_end.browser import Open, Tab
from tests.end_to_end.test_chat_page_access import Audit
from tests.server.conftest import Site
from tests.server.hearing import Hearing, hearing_and_chatting_site, saying
from weft.server.errors import QueueFullError

TRACKS = """
    window.tracks = [];
    const open = navigator.mediaDevices.getUserMedia.bind(navigator.mediaDevices);
    navigator.mediaDevices.getUserMedia = async given => {
        const stream = await open(given);
        tracks.push(...stream.getTracks());
        return stream;
    };
"""
ENDED = "tracks.length && tracks.every(track => track.readyState === 'ended')"
SPEAK, STOP = "button[aria-label=Speak]", "button[aria-label='Stop and transcribe']"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, str]]:
    site = hearing_and_chatting_site(tmp_path_factory.mktemp("ears"), saying(""))
    with site.live() as url:
        yield site, url


@pytest.fixture
def engine(live: tuple[Any, str]) -> Hearing:
    """The one that hears, as it was at first."""
    engine: Hearing = live[0].engine
    engine.writes, engine.error, engine.may_go_on = saying(" Good morning."), None, lambda num_read: True
    engine.asked.clear()
    return engine


@pytest.fixture
def page(browser: Browser, live: tuple[Any, str], engine: Hearing) -> Iterator[Page]:
    tab = Tab(browser, permissions=["microphone"])
    tab.context.add_init_script(TRACKS)
    yield tab.open(live[1])
    tab.check()
    tab.context.close()


def record(page: Page, milliseconds: int = 200) -> None:
    page.click(SPEAK)
    expect(page.locator("#speech")).to_have_text(re.compile("^Recording 0:0. of 5:00 Discard$"))
    page.wait_for_timeout(milliseconds)


def test_what_is_said_is_put_behind_what_is_written(page: Page, engine: Hearing) -> None:
    expect(page.locator("#model")).to_have_text("chat")
    page.fill("#input", "Hello")
    record(page, 1000)
    audit = Audit(page)
    audit.look("recording")
    page.set_viewport_size({"width": 360, "height": 720})
    audit.look("recording on a phone")
    assert audit.faults == {}
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    expect(page.locator(STOP)).to_be_in_viewport(ratio=1)
    page.focus(STOP)
    page.keyboard.press("Enter")
    expect(page.locator("#input")).to_have_value("Hello Good morning.")
    expect(page.locator("#input")).to_be_focused()
    expect(page.locator("#speech")).to_be_hidden()
    expect(page.locator(".user")).to_have_count(0)  # nothing is sent by itself
    assert page.evaluate(ENDED)
    heard = array("h", b"".join(bytes(each.request.input.samples) for each in engine.texts))
    assert len(heard) > 8000 and max(heard) > 1000
    expect(page.locator("#models option")).to_have_text(["chat (default)", "chat"])


def test_a_recording_is_dropped(page: Page, engine: Hearing) -> None:
    record(page)
    page.keyboard.press("Escape")
    expect(page.locator(SPEAK)).to_be_visible()
    page.wait_for_function(ENDED)
    assert engine.asked == []
    engine.may_go_on = lambda num_read: False
    record(page)
    page.click(STOP)
    expect(page.locator("#speech")).to_have_text(re.compile("^Transcribing… +Discard$"))
    for _ in range(1000):
        if not engine.asked:
            page.wait_for_timeout(20)
    page.get_by_role("button", name="Cancel the transcription").click()
    expect(page.locator(SPEAK)).to_be_visible()
    assert engine.asked[0].generation.closed.wait(60)
    page.evaluate("() => { navigator.mediaDevices.getUserMedia = () => new Promise(() => {}); }")  # the browser asks
    page.click(SPEAK)
    page.click("text=Discard")
    expect(page.locator(SPEAK)).to_be_focused()
    expect(page.locator("#input")).to_have_value("")
    expect(page.locator("#speech-fault")).to_have_text("")


def test_a_recording_ends_after_five_minutes(page: Page) -> None:
    page.clock.install()
    record(page)
    page.clock.fast_forward("05:00")
    expect(page.locator("#input")).to_have_value("Good morning.")
    assert page.evaluate(ENDED)


def test_what_went_wrong_is_told(page: Page, engine: Hearing) -> None:
    fault = page.locator("#speech-fault")
    engine.writes = saying("")
    record(page)
    page.click(STOP)
    expect(fault).to_have_text("No words were heard.")
    engine.error = QueueFullError("the queue is full")
    record(page)
    expect(fault).to_have_text("")
    page.click(STOP)
    expect(fault).to_contain_text("Too many requests are waiting. (the queue is full)")
    assert page.evaluate(ENDED)
    page.context.clear_permissions()  # a browser without a window then denies them
    page.click(SPEAK)
    expect(fault).to_contain_text("The browser does not let this page use the microphone.")
    page.evaluate(
        "() => { navigator.mediaDevices.getUserMedia = async () => { throw new DOMException('', 'NotFoundError'); }; }"
    )
    page.click(SPEAK)
    expect(fault).to_have_text("There is no microphone.")
    expect(page.locator("#input")).to_have_value("")


def test_there_is_no_button_where_nothing_hears_or_records(page: Page, open_page: Open) -> None:
    expect(page.locator(SPEAK)).to_be_visible()
    page.context.add_init_script("delete window.MediaRecorder")
    page.reload()
    expect(page.locator("#models option")).to_have_count(2)  # the models are known
    expect(page.locator("#microphone")).to_be_hidden()
    with Site().live() as url:
        deaf = open_page(url)
        expect(deaf.locator("#models option")).to_have_count(3)
        expect(deaf.locator("#microphone")).to_be_hidden()
