"""The chat page in the system's Chromium, and answers that are written down instead of generated."""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, Route, expect, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHAT = "**/v1/chat/completions"
TIMEOUT_MS = 120_000
"""Of what is waited for; only a failure takes so long."""

BLOCKED = re.compile("Content Security Policy|requires 'Trusted")

expect.set_options(timeout=TIMEOUT_MS)


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """A headless browser; skips where there is none, unless REQUIRE_BROWSER says that there must be one."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        message = f"no browser: none of {', '.join(NAMES)} is on PATH"
        pytest.fail(message) if os.environ.get("REQUIRE_BROWSER") else pytest.skip(message)
    with sync_playwright() as playwright:
        args = ["--use-fake-device-for-media-stream", *["--no-sandbox"] * (os.geteuid() == 0)]  # its microphone beeps
        browser = playwright.chromium.launch(executable_path=path, args=args, timeout=240_000)
        yield browser
        browser.close()


class Tab:
    """A page in a context of its own, and what it loads and what goes wrong in it."""

    def __init__(self, browser: Browser, *, width: int = 1280, height: int = 800, **options: Any) -> None:
        """Open it empty; options are those of a context."""
        self.context: BrowserContext = browser.new_context(viewport={"width": width, "height": height}, **options)
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.context.on("request", lambda request: self.requests.append(request.url))
        self.context.on("weberror", lambda error: self.errors.append(str(error.error)))
        self.context.on("console", lambda m: self.errors.append(m.text) if BLOCKED.search(m.text) else None)
        self.page = self.context.new_page()
        self.page.set_default_timeout(TIMEOUT_MS)

    def open(self, url: str) -> Page:
        """Go there, until the page knows the model and the engine, or asks for a key."""
        self.page.goto(url)
        self.page.wait_for_selector("#dot:is(.good, .busy), dialog[open]")
        return self.page

    def check(self) -> None:
        """Nothing has gone wrong, and no other host was asked, since the last check."""
        errors, requests = self.errors.copy(), self.requests.copy()
        self.errors.clear()
        self.requests.clear()
        assert errors == []
        assert [url for url in requests if not url.startswith(("http://127.0.0.1:", "data:", "blob:"))] == []

    def forget(self, url: str) -> None:
        """Leave the page, and nothing of it: what it stored, how it looked, who answered for the server."""
        self.page.unroute_all(behavior="ignoreErrors")
        self.page.emulate_media(color_scheme="light", reduced_motion="no-preference")
        self.page.goto(f"{url}/version")  # of the same origin, and without scripts
        self.page.evaluate(FORGET)


FORGET = """() => new Promise((resolve, reject) => {
    localStorage.clear();
    sessionStorage.clear();
    const request = indexedDB.deleteDatabase("weft");
    request.onsuccess = resolve;
    request.onerror = reject;
})"""

STORED = """async () => {
    const { Conversation } = await import("/chat_page/conversation.js");
    const { transact } = await import("/chat_page/db.js");
    return transact("readonly", async handle => Promise.all((await handle.allChats()).map(async meta => {
        const conversation = new Conversation(meta);
        conversation.absorb(meta, await handle.messagesOf(meta.id));
        return { ...meta, messages: conversation.path(), all: [...conversation.nodes.values()] };
    })));
}"""
"""The conversations in the browser's database: the messages of the path that is shown, and all of them."""

Open = Callable[..., Page]


@contextlib.contextmanager
def pages(browser: Browser) -> Iterator[Open]:
    """Opens pages in tabs of their own, which are checked and closed at the end."""
    with contextlib.ExitStack() as stack:
        tabs: list[Tab] = []

        def open_page(url: str, **options: Any) -> Page:
            tabs.append(Tab(browser, **options))
            stack.callback(tabs[-1].context.close)
            return tabs[-1].open(url)

        yield open_page
        for tab in tabs:
            tab.check()


def say(page: Page, text: str) -> None:
    """Send a message and wait until the answer is over."""
    page.fill("#input", text)
    page.press("#input", "Enter")
    page.wait_for_selector("#send:visible")


def chunk(delta: dict[str, Any] | None = None, finish: str | None = None, **more: Any) -> dict[str, Any]:
    """A chunk of a streamed answer; without a delta it carries what is in `more` alone."""
    if delta is None:
        return {"choices": [], **more}
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish, **more}]}


def stream(*chunks: dict[str, Any], done: bool = True) -> dict[str, Any]:
    """What `Route.fulfill` takes."""
    events = [f"data: {json.dumps(c)}\n\n" for c in chunks] + ["data: [DONE]\n\n"] * done
    return {"body": "".join(events), "content_type": "text/event-stream"}


def text_answer(text: str) -> dict[str, Any]:
    return stream(chunk({"role": "assistant", "content": ""}), chunk({"content": text}), chunk({}, "stop"))


def script(page: Page, *answers: dict[str, Any]) -> list[dict[str, Any]]:
    """Let these be the answers, one after the other; returns the bodies of the requests, which grow."""
    bodies: list[dict[str, Any]] = []

    def answer(route: Route) -> None:
        bodies.append(route.request.post_data_json)
        route.fulfill(**answers[len(bodies) - 1])

    page.route(CHAT, answer)
    return bodies
