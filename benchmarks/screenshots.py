"""Pictures of the chat page, from a running product and the system's Chromium.

    python -m benchmarks.screenshots --url http://127.0.0.1:8000 --out deploy/pictures

Asks the served model real questions, beside some load so that the picture of the engine has something to show. Fonts
are the machine's own: with fonts-inter installed the pictures look like they do on most desktops.
"""

import argparse
import concurrent.futures
import contextlib
import pathlib
import shutil
import threading
from collections.abc import Iterator
from typing import Any

import httpx
from playwright.sync_api import Browser, Page, sync_playwright

DESKTOP, PHONE = {"width": 1280, "height": 800}, {"width": 375, "height": 740}
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
LONG = {"type": "json_schema", "json_schema": {"name": "long", "schema": {"type": "string", "minLength": 4000}}}
WEATHER = """{
  "name": "get_weather",
  "description": "The weather in a city",
  "parameters": {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"]
  }
}"""


@contextlib.contextmanager
def load(url: str, num_streams: int) -> Iterator[None]:
    """Keep so many long answers streaming."""
    ended = threading.Event()

    def ask(number: int) -> None:
        messages = [{"role": "user", "content": f"Request {number}: " + "go on and on. " * 30 * number}]
        body = {"messages": messages, "response_format": LONG, "stream": True}
        while not ended.is_set():
            with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as answer:
                for _ in answer.iter_raw():
                    if ended.is_set():
                        break

    with concurrent.futures.ThreadPoolExecutor(max(num_streams, 1)) as pool:
        asked = [pool.submit(ask, number + 1) for number in range(num_streams)]
        try:
            yield
        finally:
            ended.set()
            for future in asked:
                future.result()


def say(page: Page, text: str) -> None:
    page.fill("#input", text)
    page.press("#input", "Enter")
    page.wait_for_selector("#send:visible", timeout=60_000)


def chat(page: Page) -> None:
    """Words, numbers, and how sure the model is of them."""
    say(page, "What is a KV cache?")
    say(page, "Tell me a story about Mia and a fox")
    page.click("[data-toggle=probabilities]")
    say(page, "What is 27 + 58?")
    page.click("[data-toggle=probabilities]")


def playground(page: Page) -> None:
    """A schema, and a call that waits for its result."""
    page.click(".card:has-text('schema')")
    page.wait_for_selector(".badge", timeout=60_000)
    page.click("[data-toggle=schema_on]")
    page.click("[data-toggle=tools_on]")
    page.fill("[data-setting=tools]", WEATHER)
    say(page, "What is the weather in Oslo?")


def take(browser: Browser, url: str, path: pathlib.Path, scene: Any, hover: str | None = None, **options: Any) -> None:
    """One picture: the scene, in a browser that has nothing stored but a temperature of 0: pictures should repeat."""
    context = browser.new_context(**options)
    context.add_init_script(
        "localStorage.setItem('weft:defaults', localStorage.getItem('weft:defaults') ?? '{\"temperature\": 0}')"
    )
    page = context.new_page()
    page.goto(url)
    page.wait_for_selector("#dot.good, #dot.busy")
    scene(page)
    if hover:
        page.hover(hover)
    page.evaluate("document.querySelector('#panel').scrollTop = 0")
    page.wait_for_timeout(1500)  # the engine's picture gathers a few readings
    page.screenshot(path=path)
    context.close()
    print(f"{path}: {path.stat().st_size // 1024} KB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--streams", type=int, default=4, help="answers that stream beside it")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        parser.error(f"none of {', '.join(NAMES)} is on PATH")
    with sync_playwright() as playwright, load(args.url, args.streams):
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        shown = {"hover": ".token >> nth=1", "viewport": DESKTOP}
        take(browser, args.url, args.out / "chat-light.png", chat, color_scheme="light", **shown)
        take(browser, args.url, args.out / "chat-dark.png", playground, color_scheme="dark", viewport=DESKTOP)
        take(browser, args.url, args.out / "chat-phone.png", chat, color_scheme="light", viewport=PHONE, has_touch=True)
        browser.close()


if __name__ == "__main__":
    main()
