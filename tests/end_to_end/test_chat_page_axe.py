"""axe-core finds nothing on the chat page, whatever it shows: light and dark, wide and on a phone."""

import functools
import importlib.resources
import importlib.util
import os
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.end_to_end.browser import chunk, say, script, stream, text_answer

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


class Audit:
    """What axe-core finds in each state."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.faults: dict[str, Any] = {}
        page.emulate_media(reduced_motion="reduce")  # colours do not fade over
        page.evaluate(axe())

    def look(self, state: str) -> None:
        if found := self.page.evaluate(RUN):
            self.faults[state] = found


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_in_any_state(page: Page, scheme: Any) -> None:
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
    page.set_viewport_size({"width": 390, "height": 844})
    audit.look("phone")
    for drawer in ("sidebar", "panel"):
        page.click(f"#open-{drawer}")
        expect(page.locator(f"#{drawer}")).to_be_in_viewport(ratio=0.9)
        audit.look(f"phone, {drawer}")
        page.keyboard.press("Escape")
    page.set_viewport_size({"width": 1280, "height": 800})
    assert audit.faults == {}
