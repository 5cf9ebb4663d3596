"""The chat page's Markdown never loses or changes a word of the model's, and its work is linear."""

import json
import random
import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page

from tests.end_to_end.browser import pages
from tests.end_to_end.conftest import LiveServer

SHOW = """const { showMarkdown } = await import("/chat_page/markdown.js");
    const show = text => {
        const element = document.createElement("div");
        showMarkdown(element, text);
        return element;
    };"""

READ = """async texts => {
    SHOW;
    const number = item => {
        let value = item.parentElement.start;
        for (const one of item.parentElement.children) {
            if (one.hasAttribute("value")) value = one.value;
            if (one === item) return value;
            value++;
        }
    };
    const read = node => {
        if (node.nodeType === Node.TEXT_NODE) return node.data;
        let inner = [...node.childNodes].map(read).join("");
        if (node.localName === "a") {
            const more = [node.href, node.title].filter(text => !inner.includes(text.replace(/\\/$/, "")));
            return [inner, ...more].join(" ");
        }
        if (node.localName === "li" && node.parentElement.localName === "ol") inner = `${number(node)}. ${inner}`;
        return getComputedStyle(node).display.startsWith("inline") && node.localName !== "br" ? inner : ` ${inner} `;
    };
    return texts.map(text => {
        const element = show(text);
        document.body.append(element);
        try { return read(element); } finally { element.remove(); }
    });
}""".replace("SHOW;", SHOW)
"""Text as a reader has it: with the numbers of lists, and with where a link leads and what it is called behind it."""


@pytest.fixture(scope="module")
def modules(browser: Browser, live_server: LiveServer) -> Iterator[Page]:
    """A page for tests that only call its modules and leave no trace on it."""
    with pages(browser) as opener:
        yield opener(live_server.base_url)


def read(page: Page, *texts: str) -> list[str]:
    return [" ".join(text.split()) for text in page.evaluate(READ, list(texts))]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        # brackets that are no link's
        ("As in [1], see [docs](https://x.org/d).", "As in [1], see docs https://x.org/d."),
        ("[see [1]](https://x.org/d) and a[0](b)", "see [1] https://x.org/d and a[0](b)"),
        ("[a [b](https://x.org/d)", "[a b https://x.org/d"),
        ("[`]`](https://x.org/d) [`[`](https://x.org/e)", "] https://x.org/d [ https://x.org/e"),
        ("\\[a](https://x.org/d)", "[a](https://x.org/d)"),
        # what follows an address
        ('[a](https://x.org/d "its title")', "a https://x.org/d its title"),
        ("[a](https://x.org/d is down) today", "[a](https://x.org/d is down) today"),
        ("[](https://x.org/d)", "https://x.org/d"),
        ("![a](data:image/png,x) [b](/v1/models)", "![a](data:image/png,x) [b](/v1/models)"),
        ("(https://x.org/a_(b)) https://x.org/a?b!", "(https://x.org/a_(b)) https://x.org/a?b!"),
        (f"https://x.org/{'a' * 3000} b", f"https://x.org/{'a' * 3000} b"),
        # what is no emphasis
        ("2 * 3 * 4 = 24, snake_case_name, 5*", "2 * 3 * 4 = 24, snake_case_name, 5*"),
        ("**Use `**kwargs` here**, *a\\*b*", "Use **kwargs here, a*b"),
        ("*[a*b](https://x.org/d) c*", "a*b https://x.org/d c"),
        # definitions stay where they are, used or not
        (
            '[a]\n\n[a]: https://x.org/d "its title"\n\n[b]: /e',
            'a https://x.org/d its title [a]: https://x.org/d "its title" [b]: /e',
        ),
        ("a[^n]\n\n[^n]: b\nc\n[^m]: d", "an n b c m d"),
        # numbers
        ("The answer is\n42.", "The answer is 42."),
        ("It was in\n1984. Then\n- came more", "It was in 1984. Then came more"),
        ("3. c\n1. a\n1. b\n7. g\n8. h", "3. c 1. a 1. b 7. g 8. h"),
        ("1. a\n2. b\n\nBreak\n\n3. c", "1. a 2. b Break 3. c"),
        # code
        ("```make title=all of it\nall:\n\techo\n```", "make title=all of it all: echo"),
        ("|a|\n|-|\n|x \\| y|", "a x | y"),
    ],
)
def test_the_words_of_a_text_are_on_the_page(modules: Page, text: str, shown: str) -> None:
    assert read(modules, text) == [shown]


def test_code_keeps_its_tabs(modules: Page) -> None:
    """A Makefile that was copied from the page did not work."""
    code = f"async text => {{ {SHOW} return show(text).querySelector('pre').textContent; }}"
    assert modules.evaluate(code, "a\n```make\nall:\n\techo\ta\n```") == "all:\n\techo\ta"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('{"id":12345678901234567890,"x":1.0}', '{\n  "id": 12345678901234567890,\n  "x": 1.0\n}'),
        ('{"a": [], "a": [1, {}]}', '{\n  "a": [],\n  "a": [\n    1,\n    {}\n  ]\n}'),
        ('["\\u00e9 {,:\\"]", -1e400, null]', '[\n  "\\u00e9 {,:\\"]",\n  -1e400,\n  null\n]'),
        (' "a b" ', '"a b"'),
        ('{"a": 1', None),
    ],
)
def test_json_is_indented_and_nothing_else(modules: Page, text: str, shown: str | None) -> None:
    """A number of more than 16 digits was shown as another one, also in the arguments of a call."""
    found = modules.evaluate("async text => (await import('/chat_page/json.js')).pretty(text)", text)
    assert found == {"text": shown or text, "isValid": shown is not None}


def test_any_json_is_shown_as_its_tokens(modules: Page) -> None:
    chance = random.Random(3)

    def value(depth: int) -> object:
        kind = chance.randrange(6 if depth < 4 else 4)
        if kind < 4:
            return (chance.randrange(10**25), chance.random(), None, "".join(chance.choices('a "\\{}[],:\n', k=5)))[
                kind
            ]
        children = [value(depth + 1) for _ in range(chance.randrange(4))]
        return children if kind == 4 else {f"k {i}": child for i, child in enumerate(children)}

    values = [value(0) for _ in range(300)]
    code = "async texts => { const { pretty } = await import('/chat_page/json.js'); return texts.map(pretty) }"
    for one, found in zip(values, modules.evaluate(code, [json.dumps(one) for one in values]), strict=True):
        expected = json.dumps(one, indent=2)
        assert found == {"text": expected, "isValid": True}


MARKS = (
    *("*", "**", "***", "_", "__", "`", "``", "```", "~~", "~~~", "[", "]", "](", "](https://x.org/", "](/", "(", ")"),
    *("!", "![", "<", "<https://y.org/", ">", "|", "-", "+", "#", "# ", "\n", "\n\n", "\n\n\n", "\r\n", "\t", "    "),
    *(
        "1. ",
        "2) ",
        "\n10. ",
        "- ",
        "\n- ",
        "\n  - ",
        "* ",
        "> ",
        "\n> ",
        "\\",
        "|-|-|",
        "\n|-|-|\n",
        "\n---\n",
        "\n```",
    ),
    *(
        "<b>",
        "&amp;",
        "https://x.org/",
        "mailto:",
        ' "',
        '")',
        " '",
        "')",
        ":",
        ".",
        ",",
        "]: ",
        "[^1]",
        "\n```py ",
        " ",
    ),
)


def test_every_word_of_any_text_is_on_the_page_in_its_order(modules: Page) -> None:
    """Titles of links, what followed an address, and more than one word behind a fence were left out."""
    chance = random.Random(2)
    texts = []
    for _ in range(6000):
        marks = chance.sample(MARKS, chance.randint(1, 12))  # some at a time, so that they meet
        length, share = chance.randint(1, 40), chance.random()
        parts = [f"w{i}x" if chance.random() < share else chance.choice(marks) for i in range(length)]
        texts.append("".join(part + chance.choice(("", "", " ")) for part in parts))
    for text, shown in zip(texts, read(modules, *texts), strict=True):
        words = re.findall(r"w\d+x", text)
        end = 0
        for word in words:
            found = shown.find(word, end)
            assert found >= 0, f"{word} of {text!r} is not in {shown!r}"
            end = found + len(word)


NASTY = (
    *(
        "*a ",
        "**a",
        "_a_ ",
        "~~",
        "***a",
        "`",
        "`` ` ",
        "[",
        "]",
        "[]",
        "](",
        "![a](",
        "[1], ",
        "[a](https://x.org ",
        "\\",
    ),
    *(
        '[a](https://x.org "',
        "[a](https://x.org/(",
        "[a](https://x.org)",
        "[[a](https://x.org)",
        "<https://",
        "https://",
    ),
    *(
        "https://x.org/((",
        "https://x.org))) ",
        "> ",
        "- ",
        "1. ",
        "1) a\n",
        "- a\n\n",
        "# ",
        "# #",
        "|",
        "|a\n|-\n",
        "a\n",
    ),
    *("a\n\n", "\n", "  \n", "```\n", "~~~ a\n", "- a\n  - b\n", "> - ", "    ", "* * ", "a|b\n", "9. a\n\n\n"),
)


@pytest.mark.parametrize("frame", [("", ""), ("- a\n", "\n  b"), ("> ", ""), ("*", "*"), ("[", "](https://x.org)")])
def test_work_is_linear(modules: Page, frame: tuple[str, str]) -> None:
    """Blank lines inside of a list were counted anew for each of them."""
    code = f"""async ([pieces, before, behind]) => {{
        {SHOW}
        const seconds = (piece, length) => {{
            const text = before + piece.repeat(length / piece.length) + behind;
            const start = performance.now();
            show(text);
            return performance.now() - start;
        }};
        // Twice the text may take three times as long, where the square takes four; the best of a few counts.
        const isLinear = piece => {{
            for (let trial = 0; trial < 12; trial++) {{
                if (seconds(piece, 40_000) < 3 * seconds(piece, 20_000) + 5) return true;
            }}
            return false;
        }};
        return pieces.filter(piece => !isLinear(piece));
    }}"""
    assert modules.evaluate(code, [list(NASTY), *frame]) == []


def test_long_texts_are_shown_whole(modules: Page) -> None:
    """More nodes than a call takes arguments."""
    code = f"async text => {{ {SHOW} return show(text).textContent.length; }}"
    for piece in ("a\n", "a\n\n", "*a* ", "- a\n", "1. a\n", "> a\n", "`a`b"):
        assert modules.evaluate(code, piece * 100_000) >= 100_000, piece
