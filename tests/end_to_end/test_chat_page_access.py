"""Who can use the chat page: with eyes, fingers, keys or a screen reader, light and dark, wide and on a phone."""

import functools
import importlib.resources
import importlib.util
import os
import re
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.end_to_end.browser import Open, chunk, say, script, stream, text_answer
from tests.end_to_end.conftest import LiveServer

PACKAGE = "axe_playwright_python"  # of which only the copy of axe-core is used

RICH = """### Title

##### Deep

Text with `code`, [a link](https://x.org), $x^2$, a note[^1] and

$$\\int_0^1 x\\,dx$$

| a | b |
|:-:|--:|
| 1 | 2 |

```py
# a comment
x = "text" + 1  # return
```

- [x] done
- [ ] to do

> quoted

[^1]: The note."""
CALL = chunk({"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "f", "arguments": "{}"}}]})
GROWING = """() => {
    const bytes = new TextEncoder().encode('data: {"choices": [{"delta": {"content": "half"}}]}\\n\\n');
    window.fetch = new Proxy(fetch, { apply: (target, self, given) => !given[0].includes("chat") ?
        Reflect.apply(target, self, given) :
        new Response(new ReadableStream({ start: stream => stream.enqueue(bytes) })) });
}"""
"""Answers have a beginning, and no end."""
RUN = """async () => (await axe.run({ resultTypes: ["violations"] })).violations
    .flatMap(({ id, nodes }) => nodes.map(node => `${id}: ${node.html.slice(0, 200)}`))"""


@functools.cache
def axe() -> str:
    """The script; skips where it is not installed, unless REQUIRE_BROWSER says that the page must be tested."""
    if importlib.util.find_spec(PACKAGE) is None:
        message = "axe-core is not installed: pip install axe-playwright-python"
        pytest.fail(message) if os.environ.get("REQUIRE_BROWSER") else pytest.skip(message)
    return importlib.resources.files(PACKAGE).joinpath("axe.min.js").read_text(encoding="utf-8")


SMALL = """() => [...document.querySelectorAll("button, a[href], input, select, textarea, summary")]
    .filter(e => e.checkVisibility({ visibilityProperty: true }) && !e.closest(".prose"))
    .map(e => [e.outerHTML, (e.closest(".check") ?? e).getBoundingClientRect()])
    .filter(([, { width, height }]) => width && (width < 24 || height < 24)).map(([html]) => html)"""
"""What a finger misses; links in a line of text cannot be larger than it."""


CONTRASTS = """() => {
    const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
    const over = colours => {
        canvas.clearRect(0, 0, 1, 1);
        for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
        return canvas.getImageData(0, 0, 1, 1).data;
    };
    const linear = v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    const light = ([r, g, b]) => [r, g, b].map(v => linear(v / 255))
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    const grounds = e => e ? [...grounds(e.parentElement), getComputedStyle(e).backgroundColor] : ["white"];
    const low = [];
    for (const element of document.querySelectorAll("body *")) {
        const text = [...element.childNodes].filter(n => n.nodeType === 3).map(n => n.data.trim()).join("");
        if (!text || !element.checkVisibility({ visibilityProperty: true })) continue;
        const ground = grounds(element);
        const [a, b] = [light(over(ground)), light(over([...ground, getComputedStyle(element).color]))];
        const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (ratio < 4.5) low.push(`${ratio.toFixed(2)} ${element.className} ${text.slice(0, 30)}`);
    }
    return low;
}"""


WITH_ROLES = {"button", "textbox", "combobox", "spinbutton", "checkbox", "img", "link", "navigation", "complementary"}


class Audit:
    """What is wrong in each state: axe-core's findings, low contrasts of text, and what is too small to be hit."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.faults: dict[str, Any] = {}
        page.emulate_media(reduced_motion="reduce")  # colours do not fade over
        page.evaluate(axe())

    def look(self, state: str) -> None:
        if found := [*self.page.evaluate(RUN), *self.page.evaluate(CONTRASTS), *self.page.evaluate(SMALL)]:
            self.faults[state] = found

    def look_at_names(self) -> None:
        """Everything that is used has a name."""
        tree = self.page.context.new_cdp_session(self.page).send("Accessibility.getFullAXTree")["nodes"]
        found = [(n["role"]["value"], n.get("name", {}).get("value", "").strip()) for n in tree if not n["ignored"]]
        named = [(role, name) for role, name in found if role in WITH_ROLES]
        assert len(named) > 40
        assert [role for role, name in named if not name] == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_can_be_seen_read_named_and_hit_in_any_state(page: Page, scheme: Any) -> None:
    page.emulate_media(color_scheme=scheme)
    audit = Audit(page)
    audit.look("welcome")
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    audit.look("all settings")
    answers = [stream(chunk({"reasoning_content": "Hm."}), chunk({"content": RICH}), chunk({}, "length"))]
    script(page, *answers, text_answer("other"), stream(CALL, chunk({}, "tool_calls")), {"status": 500, "body": ""})
    say(page, "First")
    page.get_by_role("button", name="Regenerate").click()
    page.wait_for_selector("#send:visible")
    page.get_by_role("button", name="Side by side").click()
    page.evaluate("document.querySelectorAll('.answer details').forEach(d => d.open = true)")
    audit.look("compare")
    say(page, "Second")
    page.get_by_role("button", name="Edit the arguments of f").click()
    audit.look("a call that is edited")
    audit.look_at_names()
    say(page, "Third")
    page.set_input_files("#attach-file", {"name": "a.py", "mimeType": "text/plain", "buffer": b"x = 1"})
    audit.look("failure, and a file")
    page.get_by_role("button", name="Edit message").first.click()
    audit.look("edit")
    page.keyboard.press("Escape")
    page.click("#new-chat")
    page.evaluate(GROWING)
    page.fill("#input", "Fourth")
    page.press("#input", "Enter")
    expect(page.locator(".answer .content")).to_have_text("half")
    page.fill("#search", "title")
    expect(page.locator(".conversations li")).to_have_count(1)
    audit.look("running, and a search")
    page.click("#change-key")
    audit.look("key")
    page.keyboard.press("Escape")
    page.set_viewport_size({"width": 375, "height": 812})
    audit.look("phone")
    for drawer in ("sidebar", "panel"):
        page.click(f"#open-{drawer}")
        expect(page.locator(f"#{drawer}")).to_be_in_viewport(ratio=0.9)
        audit.look(f"phone, {drawer}")
        page.keyboard.press("Escape")
    page.set_viewport_size({"width": 1280, "height": 800})
    assert audit.faults == {}


def test_the_theme_is_switched_and_kept(page: Page) -> None:
    page.emulate_media(reduced_motion="reduce")
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    expect(page.locator("body")).to_have_css("background-color", ground)
    page.click("#theme")
    expect(page.locator("body")).not_to_have_css("background-color", ground)
    page.reload()
    expect(page.locator("body")).not_to_have_css("background-color", ground)


def test_it_fits_a_phone(open_page: Open, live_server: LiveServer) -> None:
    page = open_page(live_server.base_url, width=360, height=720, has_touch=True)
    script(page, stream(chunk({"reasoning_content": "Hm."}), chunk({"content": RICH}), chunk({}, "length")))
    say(page, "First")
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert page.evaluate("[document.documentElement.scrollWidth, document.querySelector('#log').scrollWidth]") == [
        360,
        360,
    ]
    for button, drawer in (("Conversations", "#sidebar"), ("Settings and engine", "#panel")):
        expect(page.locator(drawer)).to_be_hidden()
        page.get_by_role("button", name=button, exact=True).tap()
        expect(page.locator(drawer)).to_be_in_viewport(ratio=0.9)
        assert page.evaluate("drawer => document.querySelector(drawer).contains(document.activeElement)", drawer)
        page.keyboard.press("Escape")
        expect(page.locator(drawer)).to_be_hidden()
        expect(page.get_by_role("button", name=button, exact=True)).to_be_focused()
    box = page.locator("#send").bounding_box()
    assert box and box["x"] + box["width"] <= 360 and box["width"] >= 36


def test_the_keyboard_suffices(page: Page) -> None:
    script(page, text_answer("fine"))
    page.click("#title")
    page.keyboard.press("/")
    expect(page.locator("#input")).to_be_focused()
    page.keyboard.type("one/")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    expect(page.locator("#input")).to_have_value("one/\ntwo")
    page.keyboard.press("Enter")
    expect(page.locator(".bubble")).to_have_text(re.compile("one/\ntwo"))
    expect(page.locator("#announcer")).to_have_text(re.compile("fine"))
    page.focus("#new-chat")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Control+k")
    expect(page.locator("#input")).to_be_focused()
