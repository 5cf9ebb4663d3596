"""The chat page's Markdown beside CommonMark's own examples, its formulas, attacks on it, and long answers."""

import json
import pathlib
import re
from collections.abc import Iterator
from html.parser import HTMLParser

import pytest
from playwright.sync_api import Browser, Page

from tests.end_to_end.browser import Tab
from tests.end_to_end.conftest import LiveServer

EXAMPLES = json.loads(pathlib.Path(__file__).with_name("commonmark.json").read_text())["examples"]
HEADINGS = {f"h{i}": f"h{min(i + 2, 6)}" for i in range(1, 7)}
"""The page has a heading of its own above those of an answer."""
DELIBERATE = r"\\\[.*\\\]|\[\]\(|^!\[\[\["
"""A formula, links without words, which show their address, and a label with an image's mark."""
LEFT_OUT = {"HTML blocks", "Raw HTML"}
"""HTML is plain text here."""


@pytest.fixture(scope="module")
def tab(browser: Browser, live_server: LiveServer) -> Iterator[Tab]:
    tab = Tab(browser)
    tab.open(live_server.base_url)
    yield tab
    tab.check()
    tab.context.close()


@pytest.fixture
def modules(tab: Tab) -> Page:
    return tab.page


class Shape(HTMLParser):
    """Elements and words of HTML, without what the page adds, and without links: few examples lead to other sites."""

    def __init__(self, html: str, is_ours: bool) -> None:
        super().__init__()
        self.is_ours = is_ours
        self.parts: list[str] = []
        self.skipped = 0
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if self.skipped or values.get("class") == "code-head":
            self.skipped += tag not in ("path", "img", "input")
        elif tag in ("img", "br"):
            self.parts.append(values.get("alt") or " ")
        elif tag not in ("a", "div", "span"):
            start = f" {values['start']}" if values.get("start") else ""
            self.parts.append(f"<{tag if self.is_ours else HEADINGS.get(tag, tag)}{start}>")

    def handle_endtag(self, tag: str) -> None:
        if self.skipped:
            self.skipped -= tag not in ("path", "img", "input")
        elif tag not in ("a", "div", "span", "br", "img", "hr"):
            self.parts.append(f"</{tag if self.is_ours else HEADINGS.get(tag, tag)}>")

    def handle_data(self, data: str) -> None:
        if not self.skipped:
            self.parts.append(data)

    def text(self) -> str:
        joined = re.sub(r"\s+", " ", "".join(self.parts))
        return re.sub(r" ?(</?(?:p|[uo]l|li|h\d|pre|code|blockquote|hr)[^>]*>) ?", r"\1", joined).strip()


RENDER = """async texts => {
    const { showMarkdown } = await import("/chat_page/markdown.js");
    return texts.map(text => {
        const element = document.createElement("div");
        showMarkdown(element, text);
        for (const definition of element.querySelectorAll(".definition")) definition.remove();
        return element.innerHTML;
    });
}"""


def test_examples_of_commonmark(modules: Page) -> None:
    """All that have no HTML in them; links of one site are read as links here, and not followed."""
    chosen = [each for each in EXAMPLES if each[0] not in LEFT_OUT and not re.search(r"<[a-z!/?]", each[1])]
    modules.evaluate("""async () => {
        const { parser } = await import("/chat_page/parser.js");
        window.validate = parser.validateLink;
        parser.validateLink = () => true;
    }""")
    shown = modules.evaluate(RENDER, [markdown for _, markdown, _ in chosen])
    modules.evaluate("async () => { (await import('/chat_page/parser.js')).parser.validateLink = window.validate }")
    shapes = zip(chosen, shown, strict=True)
    differing = [m for (_, m, html), ours in shapes if Shape(html, False).text() != Shape(ours, True).text()]
    assert len(chosen) > 500
    assert [markdown for markdown in differing if not re.search(DELIBERATE, markdown)] == []


def html(page: Page, *texts: str) -> list[str]:
    return [str(each) for each in page.evaluate(RENDER, list(texts))]


TEX = re.compile(r'<annotation encoding="application/x-tex">(.*?)</annotation>', re.DOTALL)


@pytest.mark.parametrize(
    ("text", "formulas"),
    [
        (r"a $x^2$ b", ["x^2"]),
        (r"a \(x^2\) b", ["x^2"]),
        (r"\[x^2\]", ["x^2"]),
        ("a\n\\[\n= x\n- y\n\\]\nb", ["\n= x\n- y\n"]),
        ("$$\nx\n$$\n\nb $$y$$", ["\nx\n", "y"]),
        ("- a\n  $$\n  x\n  $$\n- b", ["\nx\n"]),
        (r"|a|\n|-|\n|$x$|".replace("\\n", "\n"), ["x"]),
        (r"**$a_1$ and $b_1$**", ["a_1", "b_1"]),
        ("$a*b$ and *c*", ["a*b"]),
        ("it costs $5 and $10, or US$3 and US$4", []),
        ("`$x$` $ x$ $x $ \\$x$ $$", []),
        ("$x\n\ny$ \\(z\n\nz\\)", []),
    ],
)
def test_formulas(modules: Page, text: str, formulas: list[str]) -> None:
    html(modules, "$x$")  # which loads KaTeX
    modules.wait_for_function("() => window.katex")
    (shown,) = html(modules, text)
    assert TEX.findall(shown) == formulas
    assert "<math" in shown or not formulas


def test_a_formula_that_is_not_known_stays_as_it_is(modules: Page) -> None:
    (shown,) = html(modules, r"a $\nosuchthing$ b")
    assert r"<code>$\nosuchthing$</code>" in shown


INJECTIONS = (
    "<script>attack()</script>",
    "<img src=x onerror=attack()>",
    "<svg onload=attack()>",
    "<iframe srcdoc='<script>attack()</script>'>",
    "<a href='javascript:attack()'>x</a>",
    "[x](javascript:attack())",
    "[x](JaVaScRiPt:attack())",
    "[x](&#106;avascript:attack())",
    "[x](java%0ascript:attack())",
    "[x](data:text/html;base64,PHNjcmlwdD4=)",
    "[x](vbscript:attack)",
    "<javascript:attack()>",
    "![x](https://x.org/pixel.png)",
    "![x](javascript:attack())",
    "[x]: javascript:attack()\n\n[x]",
    '[x](https://x.org "" onmouseover=attack() "")',
    "```html onload=attack()\n<script>attack()</script>\n```",
    "`<script>attack()</script>`",
    r"$\href{javascript:attack()}{x}$",
    r"$\htmlData{onclick=attack()}{x}$ $\url{javascript:attack()}$ $\includegraphics{https://x.org/a.png}$",
    "|<img src=x onerror=attack()>|\n|-|\n|[x](javascript:attack())|",
    "[^<script>]: <b onclick=attack()>\n\n[^<script>]",
    "- [x] <input autofocus onfocus=attack()>",
)


def test_injections_do_nothing(tab: Tab) -> None:
    page = tab.page
    page.evaluate("() => { window.attack = () => { window.isAttacked = true } }")
    shown = html(page, *INJECTIONS)
    page.evaluate(
        """async texts => {
            const { showMarkdown } = await import("/chat_page/markdown.js");
            for (const text of texts) showMarkdown(document.querySelector("#announcer"), text);
        }""",
        list(INJECTIONS),
    )
    page.wait_for_timeout(100)
    assert page.evaluate("window.isAttacked") is None
    for text, each in zip(INJECTIONS, shown, strict=True):
        assert not re.search(r"<(script|img|iframe|b|input (?!type=.checkbox. disabled))\b", each), text
        assert not re.search(r"<[^>]*(\son\w+=|javascript:|data:text|vbscript:)", each), text
    assert [url for url in tab.requests if "x.org" in url] == []


def test_code_is_coloured_once_it_is_complete(modules: Page) -> None:
    code = """async () => {
        const { showMarkdown } = await import("/chat_page/markdown.js");
        const element = document.createElement("div");
        const text = "```python\\ndef f(x): return 'a' + 1  # b";
        showMarkdown(element, text, true);
        const isPlain = !element.querySelector("code span");
        showMarkdown(element, text, false);
        await import("/chat_page/vendor/highlight.js");
        await new Promise(resolve => setTimeout(resolve, 50));
        const words = kind => [...element.querySelectorAll(`.code-${kind}`)].map(span => span.textContent);
        const kinds = ["word", "text", "number", "comment"].map(words);
        return [isPlain, ...kinds, element.querySelector("pre").textContent];
    }"""
    words = [["def", "return"], ["'a'"], ["1"], ["# b"]]
    assert modules.evaluate(code) == [True, *words, "def f(x): return 'a' + 1  # b"]


def test_what_comes_later_is_read_once_the_text_is_complete(modules: Page) -> None:
    code = """async () => {
        const { showMarkdown } = await import("/chat_page/markdown.js");
        const element = document.createElement("div");
        const text = "See [docs].\\n\\nMore.\\n\\n[docs]: https://x.org/d\\n\\nEnd";
        for (let end = 1; end <= text.length; end++) showMarkdown(element, text.slice(0, end), true);
        const before = element.querySelectorAll("p:first-child a").length;
        showMarkdown(element, text, false);
        return [before, element.querySelector("p:first-child a").href];
    }"""
    assert modules.evaluate(code) == [0, "https://x.org/d"]


def test_a_stream_is_shown_as_the_whole_text_is(modules: Page) -> None:
    """Only the last block is read again: whatever is cut where, it comes to the same."""
    code = """async texts => {
        const { showMarkdown } = await import("/chat_page/markdown.js");
        return texts.filter(text => {
            const [grown, whole] = [1, 2].map(() => document.createElement("div"));
            for (let end = 0; end < text.length; end += 3) showMarkdown(grown, text.slice(0, end), true);
            showMarkdown(grown, text);
            showMarkdown(whole, text);
            return grown.innerHTML !== whole.innerHTML;
        });
    }"""
    joined = ["\n".join(markdown for _, markdown, _ in EXAMPLES[at : at + 4]) for at in range(0, len(EXAMPLES), 4)]
    assert modules.evaluate(code, [*joined, "a\r\n\r\nb\r\n- c\r\n"]) == []


def test_an_answer_of_a_megabyte_streams_smoothly(modules: Page) -> None:
    """Every chunk made the page read the whole answer again."""
    code = """async () => {
        const { showMarkdown } = await import("/chat_page/markdown.js");
        const element = document.createElement("div");
        document.body.append(element);
        const part = "# Part\\n\\nSome *words* and `code` with a [link](https://x.org/d).\\n\\n- a\\n- b\\n\\n";
        const text = part.repeat(1_000_000 / part.length);
        showMarkdown(element, text, true);
        const start = performance.now();
        let grown = text;
        for (let i = 0; i < 50; i++) showMarkdown(element, (grown += "more words "), true);
        const milliseconds = (performance.now() - start) / 50;
        element.remove();
        return milliseconds;
    }"""
    assert modules.evaluate(code) < 300  # whole it takes seconds
