"""Links of the documentation lead to files and headings that exist. Of addresses elsewhere only the form is checked."""

import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "demo_model/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]


def prose(page: str) -> str:
    """The page without what stands in code."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE))


def targets(page: str) -> list[str]:
    """Where links and pictures lead, in Markdown and in HTML."""
    text = re.sub(r"\[(`[^`]*`)\]", "[code]", page)  # a link may be named by code
    in_markdown = re.findall(r"\]\(([^)\s]+)\)", prose(text))
    return [*in_markdown, *re.findall(r'\b(?:src|srcset|href)="([^"]+)"', page)]


def anchors(page: str) -> set[str]:
    """What GitHub makes of the page's headings."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    names: list[str] = []
    for title in titles:
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        slug = re.sub(r"[^\w\- ]", "", shown.strip().lower()).replace(" ", "-")
        num_before = sum(1 for name in names if re.fullmatch(re.escape(slug) + r"(-\d+)?", name))
        names.append(f"{slug}-{num_before}" if num_before else slug)
    return set(names)


def fault(path: Path, target: str) -> str | None:
    """What is wrong with a link of the page at that path."""
    if "://" in target:
        parts = urlsplit(target)
        is_good = parts.scheme in ("http", "https") and re.fullmatch(r"[\w.-]+\.[a-z]+|127\.0\.0\.1:\d+", parts.netloc)
        return None if is_good else f"{target} is no address"
    name, _, anchor = target.partition("#")
    file = (path.parent / name).resolve() if name else path
    if not file.is_relative_to(ROOT) or not file.exists():
        return f"{target}: there is no such file"
    if anchor and anchor not in anchors(file.read_text(encoding="utf-8")):
        return f"{target}: there is no such heading"
    return None


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(path: Path) -> None:
    faults = [fault(path, target) for target in targets(path.read_text(encoding="utf-8"))]
    assert [text for text in faults if text] == []


def test_every_page_can_be_reached_from_the_readme() -> None:
    linked = {target.partition("#")[0] for target in targets((ROOT / "README.md").read_text(encoding="utf-8"))}
    pages = {path.relative_to(ROOT).as_posix() for path in PAGES if path.name != "README.md" or path.parent != ROOT}
    assert pages <= linked


def test_links_are_found_and_code_is_none() -> None:
    page = '[a](b.md) ![c](d.svg) [`e`](f.md#g) `[h](i)` <img src="j.png">\n```\n[k](l)\n```\n'
    assert targets(page) == ["b.md", "d.svg", "f.md#g", "j.png"]


def test_anchors_are_those_of_github() -> None:
    page = "# The API\n## `weft chat`\n### GET /health, again\n```\n# no heading\n```\n## [Links](x.md)\n## Links\n"
    assert anchors(page) == {"the-api", "weft-chat", "get-health-again", "links", "links-1"}


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("docs/api.md", None),
        ("#links", None),
        ("docs/api.md#tools", None),
        ("https://keepachangelog.com/en/1.1.0/", None),
        ("http://127.0.0.1:8000", None),
        ("docs/no_such_page.md", "docs/no_such_page.md: there is no such file"),
        ("../", "../: there is no such file"),
        ("docs/api.md#nothing", "docs/api.md#nothing: there is no such heading"),
        ("https:///path", "https:///path is no address"),
        ("ftp://example.com/", "ftp://example.com/ is no address"),
    ],
)
def test_a_broken_link_is_told(target: str, expected: str | None) -> None:
    assert fault(ROOT / "README.md", target) == expected
