"""The chat page in the system's Chromium, and answers that are written down instead of generated."""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHAT = "**/v1/chat/completions"
TIMEOUT_MS = 15_000
BLOCKED = re.compile("Content Security Policy|requires 'Trusted")

expect.set_options(timeout=TIMEOUT_MS)


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """A headless browser; skips where there is none, unless WEFT_REQUIRE_BROWSER says that there must be one."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        message = f"no browser: none of {', '.join(NAMES)} is on PATH"
        pytest.fail(message) if os.environ.get("WEFT_REQUIRE_BROWSER") else pytest.skip(message)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox"] if os.geteuid() == 0 else [], timeout=60_000
        )
        yield browser
        browser.close()


Open = Callable[..., Page]


@contextlib.contextmanager
def pages(browser: Browser) -> Iterator[Open]:
    """Opens pages, each with a storage of its own; what they load and what goes wrong in them is checked at the end."""
    with contextlib.ExitStack() as stack:
        errors: list[str] = []
        requests: list[str] = []

        def open_page(url: str, *, width: int = 1280, height: int = 800, **options: Any) -> Page:
            context = browser.new_context(viewport={"width": width, "height": height}, **options)
            stack.callback(context.close)
            context.on("request", lambda request: requests.append(request.url))
            context.on("weberror", lambda error: errors.append(str(error.error)))
            context.on("console", lambda m: errors.append(m.text) if BLOCKED.search(m.text) else None)
            page = context.new_page()
            page.set_default_timeout(TIMEOUT_MS)
            page.goto(url)
            page.wait_for_selector("#messages > *")
            return page

        yield open_page
        assert errors == []
        assert [url for url in requests if not url.startswith(("http://127.0.0.1:", "data:", "blob:"))] == []


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
