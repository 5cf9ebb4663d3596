"""The README is short, and it and the pages behind it promise nothing that is not there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
MAX_LINES = 150


def test_the_readme_is_read_in_minutes() -> None:
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= MAX_LINES
    assert [line for line in lines if len(line) > 120 and not line.startswith("|")] == []


def test_what_no_gpu_has_run_stands_near_the_top() -> None:
    head = "\n".join(README.read_text(encoding="utf-8").splitlines()[:30])
    assert "**Status" in head
    assert "No GPU has run" in head


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_no_figure_of_speed_stands_without_a_stored_run(path: Path) -> None:
    """Whole tables and paragraphs of them came from runs that nobody can look up."""
    page = path.read_text(encoding="utf-8")
    prose = re.sub(r"<!-- generated: (\S+\.json) -->.*?<!-- /generated: \1 -->", "", page, flags=re.DOTALL)
    assert re.findall(r"[\d.,]+ (?:ms|us|tok/s|tokens/s|events/s)\b", prose) == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_make_target_that_is_named_exists(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)(?:[A-Z_]+=\S+ )?make ([a-z-]+)", path.read_text(encoding="utf-8"), re.MULTILINE))
    assert named <= targets
    if path == README:
        assert {"serve", "test", "gpu"} <= named
