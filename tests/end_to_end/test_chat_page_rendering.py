"""What the chat page makes of answers that are written down here: text, faults, reasoning; and who can use it."""

import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.end_to_end.browser import CHAT, Tab, chunk, pages, say, script, stream, text_answer
from tests.end_to_end.conftest import LiveServer

SHOW = """async text => {
    const { showMarkdown } = await import("/chat_page/markdown.js");
    const element = document.createElement("div");
    showMarkdown(element, text);
    return element;
}"""


@pytest.fixture(scope="module")
def modules(browser: Browser, live_server: LiveServer) -> Iterator[Page]:
    """A page for tests that only call its modules and leave no trace on it."""
    with pages(browser) as opener:
        yield opener(live_server.base_url)


def rendered(page: Page, text: str) -> str:
    """HTML of the nodes that a text becomes, without the attributes that all links have."""
    html = str(page.evaluate(f"async text => (await ({SHOW})(text)).innerHTML", text))
    return html.replace(' target="_blank" rel="noopener noreferrer nofollow"', "").replace(' dir="auto"', "")


TABLE = """<div class="table" tabindex="0" role="group" aria-label="Table"><table><thead><tr><th>a</th>
<th class="center">b</th></tr></thead><tbody><tr><td>1</td><td class="center"><code>2</code></td></tr></tbody></table>
</div>""".replace("\n", "")
INJECTION = """<script>window.injected = 1</script><img src=x onerror="window.injected = 2">

[click](javascript:window.injected=3) `<b>` ![p](https://example.com/p.png)

```html
<script>window.injected = 4</script>
```"""


def test_html_in_an_answer_stays_text(page: Page) -> None:
    script(page, text_answer(INJECTION), text_answer("ok"))
    say(page, "<i>Hello</i>")
    content = page.locator(".answer .content")
    expect(content).to_contain_text('<script>window.injected = 1</script><img src=x onerror="window.injected = 2">')
    expect(content).to_contain_text("[click](javascript:window.injected=3)")
    expect(content.locator("pre")).to_have_text("<script>window.injected = 4</script>")
    expect(page.locator(".bubble")).to_have_text("<i>Hello</i>")
    assert page.locator("#messages :is(script, img, i, b)").count() == 0
    say(page, INJECTION)  # as the title of nothing, and as the user's own words
    assert page.evaluate("window.injected") is None


def test_the_browser_itself_refuses_html_from_strings(tab: Tab, page: Page) -> None:
    for code in ("document.body.innerHTML = '<b>x</b>'", "document.write('x')", "eval('1')", "new Function('1')"):
        attempt = f"try {{ {code}; resolve('done') }} catch {{ resolve('refused') }}"
        # By a timer: what a debugger runs itself may evaluate strings.
        assert page.evaluate(f"() => new Promise(resolve => setTimeout(() => {{ {attempt} }}))") == "refused"
    assert tab.errors
    tab.errors.clear()


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("a *b* **c** ***d*** _e_ ~~f~~ `g`", "<p>a <em>b</em> <strong>c</strong> <em><strong>d</strong></em> "
         "<em>e</em> <del>f</del> <code>g</code></p>"),
        ("snake_case_name 2 * 3 * 4 \\*x\\*", "<p>snake_case_name 2 * 3 * 4 *x*</p>"),
        ("**open *a* `b", "<p>**open <em>a</em> `b</p>"),
        ("one\ntwo\n\nthree", "<p>one<br>two</p><p>three</p>"),
        ("# A #\n## B", "<h3>A</h3><h4>B</h4>"),
        ("- a\n  - b\n    - c\n- d", "<ul><li>a<ul><li>b<ul><li>c</li></ul></li></ul></li><li>d</li></ul>"),
        ("3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
        ("1. a\n\n   more\n\n2. b", "<ol><li><p>a</p><p>more</p></li><li><p>b</p></li></ol>"),
        ("> a\n> > b", "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>"),
        ("a\n\n---\n\nb", "<p>a</p><hr><p>b</p>"),
        ("[a](https://x.org/(b)) <https://y.org>", '<p><a href="https://x.org/(b)">a</a> <a href="https://y.org">'
         "https://y.org</a></p>"),
        ("see https://x.org/a_b_c.", '<p>see <a href="https://x.org/a_b_c">https://x.org/a_b_c</a>.</p>'),
        ("[a](data:text/html,x) [b](//x.org) [c](/v1)", "<p>[a](data:text/html,x) [b](//x.org) [c](/v1)</p>"),
        ("|a|b|\n|-|:-:|\n|1|`2`|", TABLE),
        ("&lt;b&gt; &amp;", "<p>&lt;b&gt; &amp;</p>"),
        ("a<br>b <b>c</b>", "<p>a<br>b &lt;b&gt;c&lt;/b&gt;</p>"),
        ("[a][d] [e]\n\n[d]: https://x.org/d", '<p><a href="https://x.org/d">a</a> [e]</p><p class="definition">'
         '[d]: <a href="https://x.org/d">https://x.org/d</a></p>'),
        ("a[^1]\n\n[^1]: *b*", '<p>a<sup>1</sup></p><p class="footnote"><sup>1</sup> <em>b</em></p>'),
        ("- [x] a\n- [ ] b", '<ul><li class="task"><input type="checkbox" disabled="" checked="" aria-label="Done"> a'
         '</li><li class="task"><input type="checkbox" disabled="" aria-label="To do"> b</li></ul>'),
        ("5. a\n7. b", '<ol start="5"><li>a</li><li value="7">b</li></ol>'),
    ],
)  # fmt: skip
def test_markdown(modules: Page, text: str, html: str) -> None:
    assert rendered(modules, text) == html


@pytest.mark.parametrize("text", ["```py\nx = '<b>'\n```\nend", "```py\nx = '<b>'"])
def test_code_keeps_its_text(page: Page, text: str) -> None:
    script(page, text_answer(text))
    say(page, "Code")
    assert page.text_content(".answer pre") == "x = '<b>'"
    assert page.text_content(".answer .code-head") == "py"
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Copy code").click()
    assert page.evaluate("navigator.clipboard.readText()") == "x = '<b>'"


PIECES = (
    *(
        "*",
        "**",
        "_",
        "`",
        "```",
        "~~",
        "[",
        "](",
        ")",
        "!",
        "<",
        ">",
        "|",
        "-",
        "#",
        "\n",
        "\n\n",
        "    ",
        "1. ",
        "- ",
    ),
    *("> ", "\\", "|-|-|", "<script>", "</p>", "javascript:x", "https://x.org", "data:,x", "&#60;", " ", "a", "b", "é"),
)


TAGS = (
    "p|br|em|strong|del|sup|code|pre|a|[uo]l|li|blockquote|hr|h[3-6]|table|thead|tbody|t[rhd]|div|span|button|svg|path"
)


def test_any_text_becomes_harmless_nodes(modules: Page) -> None:
    chance = random.Random(0)
    texts = ["".join(chance.choices(PIECES, k=chance.randint(1, 40))) for _ in range(1500)]
    code = f"""async texts => Promise.all(texts.map(async text => {{
        const nodes = [...(await ({SHOW})(text)).querySelectorAll("*")];
        return [[...new Set(nodes.map(node => node.localName))],
                nodes.flatMap(node => [...node.attributes].map(a => [a.name, a.value]))];
    }}))"""
    known = {"class", "href", "target", "rel", "start", "type", "title", "aria-label", "aria-hidden", "viewBox", "d"}
    for text, (tags, attributes) in zip(texts, modules.evaluate(code, texts), strict=True):
        assert all(re.fullmatch(TAGS, tag) for tag in tags), text
        assert {name for name, _ in attributes} <= known | {"tabindex", "value", "dir", "role", "aria-level"}, text
        assert all(value.startswith("https://") for name, value in attributes if name == "href"), text


def test_what_has_not_changed_keeps_its_nodes(modules: Page) -> None:
    code = """async () => {
        const { showMarkdown } = await import("/chat_page/markdown.js");
        const element = document.createElement("div");
        showMarkdown(element, "one\\n\\ntwo\\n\\nthree", true);
        const [one, two, three] = element.children;
        showMarkdown(element, "one\\n\\ntwo\\n\\nthree four\\n\\nfive", true);
        return [element.children[0] === one, element.children[2] === three, element.textContent];
    }"""
    assert modules.evaluate(code) == [True, False, "onetwothree fourfive"]


ERROR = {"message": "temperature must be at most 2, got 9", "type": "invalid_request_error"}


def refusal(status: int, code: str | None) -> dict[str, Any]:
    return {"status": status, "json": {"error": {"message": "m", "code": code}}, "headers": {"retry-after": "2"}}


HALF = chunk({"content": "half"})
FAILURES: tuple[tuple[dict[str, Any] | None, str], ...] = (
    ({"status": 400, "json": {"error": ERROR}}, "temperature must be at most 2, got 9"),
    ({"status": 503, "json": {"error": {"message": "the queue is full"}}}, "the queue is full"),
    (refusal(503, "queue_full"), "Too many requests are waiting. (m) Try again in 2 s."),
    (refusal(429, "rate_limit_exceeded"), "The limit of this API key is reached. (m) Try again in 2 s."),
    (refusal(429, None), "The limit of this API key is reached. (m) Try again in 2 s."),
    (refusal(503, "shutting_down"), "The server was shut down. (m)"),
    ({"status": 502, "body": "<h1>Bad gateway</h1>"}, "The server answered 502."),
    (stream(HALF, {"error": {"message": "the engine died"}}), "the engine died"),
    (stream(HALF, done=False), "The connection was lost"),
    (None, "The server cannot be reached."),
)
"""What becomes of a request, None: nothing; and what the page says."""


def test_a_failure_is_shown_and_can_be_tried_again(page: Page) -> None:
    bodies: list[Any] = []

    def answer(route: Route) -> None:
        asked = route.request.post_data_json
        failure, _ = FAILURES[int(asked["messages"][0]["content"].split()[1])]
        is_again = asked["messages"] in [body["messages"] for body in bodies]
        bodies.append(asked)
        if failure or is_again:
            return route.fulfill(**(text_answer("now") if is_again or not failure else failure))
        return route.abort()

    page.route(CHAT, answer)
    for number, (_, told) in enumerate(FAILURES):
        page.click("#new-chat")
        say(page, f"Question {number} is long")
        expect(page.locator(".error")).to_contain_text(told)
    page.reload()
    for number, (failure, told) in enumerate(FAILURES):
        page.click(f".conversations .open:has-text('Question {number} ')")
        expect(page.locator(".bubble")).to_have_text(f"Question {number} is long")
        expect(page.locator(".error")).to_contain_text(told)
        is_begun = bool(failure) and "half" in (failure or {}).get("body", "")
        expect(page.get_by_role("button", name="Continue")).to_have_count(int(is_begun))
        if is_begun:
            expect(page.locator(".answer .content")).to_have_text("half")
        page.get_by_role("button", name="Try again").click()
        expect(page.locator(".answer .content")).to_have_text("now")
        assert bodies[-1]["messages"] == [{"role": "user", "content": f"Question {number} is long"}]
    assert len(bodies) == 2 * len(FAILURES)


def test_a_key_that_is_accepted_no_more_is_asked_for_and_nothing_is_lost(page: Page) -> None:
    """As after a restart of the server with another key, while the page is open."""
    script(page, text_answer("fine"))
    say(page, "Hello")

    def refuse(route: Route) -> None:
        if route.request.headers.get("authorization") == "Bearer new":
            return route.continue_()
        return route.fulfill(status=401, json={"error": {"message": "m", "code": "invalid_api_key"}})

    page.route("**/stats", refuse)
    dialog = page.locator("dialog")
    expect(dialog).to_be_visible()
    expect(page.locator("#key-reason")).to_have_text("The API key is missing, or is accepted no more. (m)")
    expect(page.locator("#pill-text")).to_have_text("no key")
    page.fill("#key", "new")
    page.keyboard.press("Enter")
    expect(dialog).to_be_hidden()
    expect(page.locator("#pill-text")).to_have_text("idle")
    expect(page.locator(".answer .content")).to_have_text("fine")


SHORT_PAUSES = """() => {
    const pauses = [];
    const original = window.setTimeout;
    window.setTimeout = (action, ms, ...rest) => {
        if (ms >= 500) document.body.dataset.pauses = pauses.push(ms) && pauses;
        return original(action, Math.min(ms, 10), ...rest);
    };
}"""


def test_a_server_that_is_away_is_asked_less_and_less(page: Page) -> None:
    """The browser's console got two lines a second for as long as the page was open."""
    page.evaluate(SHORT_PAUSES)
    page.route("**/stats", lambda route: route.abort())
    page.wait_for_selector("body[data-pauses$='5000,5000,5000']")
    pauses = page.get_attribute("body", "data-pauses")
    assert pauses is not None
    assert [pause for pause in pauses.split(",") if pause != "500"][:5] == ["1000", "2000", "4000", "5000", "5000"]
    page.unroute("**/stats")
    page.wait_for_selector("body[data-pauses$=',500']")


def test_a_state_that_never_comes_is_asked_for_again(page: Page) -> None:
    """A request that got lost was the last one."""
    page.evaluate("() => (AbortSignal.timeout = ((wait) => () => wait(200))(AbortSignal.timeout.bind(AbortSignal)), 0)")
    page.route("**/stats", lambda route: None)
    expect(page.locator("#pill-text")).to_have_text("server is away")
    page.unroute("**/stats")
    expect(page.locator("#pill-text")).to_have_text("idle")


def test_reasoning_is_folded_and_switched(page: Page) -> None:
    page.route("**/stats", with_switch)
    page.reload()
    expect(page.locator("#chip-thinking")).to_be_visible()
    bodies = script(
        page, *[stream(chunk({"reasoning_content": "Hm."}), chunk({"content": "Yes."}), chunk({}, "stop"))] * 2
    )
    say(page, "Well?")
    page.click("#chip-thinking")
    say(page, "Well?")
    switches = [body["chat_template_kwargs"] for body in bodies]
    assert switches == [{"enable_thinking": False}, {"enable_thinking": True}]
    thinking = page.locator(".thinking").first
    assert thinking.get_attribute("open") is None
    expect(thinking.locator(".prose")).to_be_hidden()
    page.click("text=/^Thought/ >> nth=0")
    expect(thinking.locator(".prose")).to_have_text("Hm.")
    assert bodies[1]["messages"][1] == {"role": "assistant", "content": "Yes."}


def with_switch(route: Any) -> None:
    stats = route.fetch().json()
    route.fulfill(json={**stats, "thinking": {"on": {"enable_thinking": True}, "off": {"enable_thinking": False}}})


def token(text: str, data: bytes, others: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        "token": text,
        "logprob": -0.5,
        "bytes": list(data),
        "top_logprobs": [{"token": other, "logprob": -0.5} for other in (text, *others)],
    }


def test_tokens_that_share_a_character_show_it(page: Page) -> None:
    """They showed a replacement character each."""
    parts = [token("�", b" \xe2\x82", ("a",)), token("�", b"\xac"), token("!", b"!")]
    script(page, stream(chunk({"content": " €!"}, logprobs={"content": parts}), chunk({}, "stop")))
    say(page, "How much?")
    expect(page.locator(".token")).to_have_text([" ", "€", "!"])
    page.locator(".token").nth(1).hover()
    expect(page.locator("#alternatives .chosen")).to_contain_text("�")


# --- where it is kept -------------------------------------------------------------------------------------------------

BLOCKED = """for (const name of ["localStorage", "sessionStorage", "indexedDB"]) {
    Object.defineProperty(window, name, { get() { throw new DOMException("Access is denied", "SecurityError"); } });
}"""
FULL_UP = "Storage.prototype.setItem = () => { throw new DOMException('Full', 'QuotaExceededError'); }"


@pytest.mark.parametrize(
    ("obstacle", "told"),
    [(BLOCKED, "lost when the page is closed"), (FULL_UP, "browser only")],
    ids=["blocked", "full"],
)
def test_it_works_where_nothing_can_be_kept(
    browser: Browser, live_server: LiveServer, obstacle: str, told: str
) -> None:
    """The page did not start where site storage was blocked."""
    tab = Tab(browser)
    tab.page.add_init_script(obstacle)
    page = tab.open(live_server.base_url)
    bodies = script(page, text_answer("one"), text_answer("two"))
    page.click("[data-toggle=probabilities]")
    page.click("#theme")
    say(page, "First")
    page.fill("[data-setting=system]", "Be brief.")
    say(page, "Second")
    expect(page.locator(".answer .content")).to_have_text(["one", "two"])
    assert [message["content"] for message in bodies[1]["messages"]] == ["Be brief.", "First", "one", "Second"]
    assert bodies[1]["logprobs"] is True
    expect(page.locator("#kept")).to_contain_text(told)
    if obstacle == BLOCKED:
        page.click("#new-chat")
        page.click(".conversations .open")  # as long as the page is open
        expect(page.locator(".bubble")).to_have_text(["First", "Second"])
    tab.check()
    tab.context.close()
