"""docs/structure.md: every folder has its line, every module its sentence, and the reading path is short and exists."""

import re
from pathlib import Path

import pytest

from docs.structure import CHAT_REQUEST, ENGINE_STEP, FOLDERS, code_lines, first_sentence, folders, modules

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/structure.md").read_text(encoding="utf-8")
MAX_LINES = 250
MAX_READING_LINES = 4950
"""What an engineer reads in a weekend, with time to think."""


def test_every_folder_says_what_it_is_for() -> None:
    assert sorted(FOLDERS) == folders(ROOT)
    assert all(purpose.endswith(".") for purpose in FOLDERS.values())


def test_every_module_begins_with_what_it_is_for() -> None:
    sentences = {path: first_sentence(path) for folder in FOLDERS for path in modules(ROOT, folder)}
    assert len(sentences) > 300
    assert [path for path, sentence in sentences.items() if not sentence.endswith((".", ":", "?"))] == []


def test_the_page_can_be_read_at_once() -> None:
    assert len(PAGE.splitlines()) <= MAX_LINES


def test_the_path_of_a_chat_request_and_of_a_step_is_read_in_a_weekend() -> None:
    path = [*CHAT_REQUEST, *ENGINE_STEP]
    assert len(path) == len(set(path))
    assert sum(code_lines((ROOT / name).read_text(encoding="utf-8")) for name in path) <= MAX_READING_LINES


def test_every_path_that_the_page_names_exists() -> None:
    named = re.findall(r"`((?:server|engine|tests|docs|benchmarks|demo_model|deploy)/[\w./]*)`", PAGE)
    assert len(named) > 20
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize(
    ("name", "source", "sentence"),
    [
        ("a.py", '"""Does this. And that.\n\nMore.\n"""\n', "Does this."),
        ("a.py", '"""Reads a.json, in both\ndialects; `x.py` too."""\n', "Reads a.json, in both dialects; `x.py` too."),
        ("a.c", "/* Adds numbers.\n *\n * Slowly. */\nint x;\n", "Adds numbers."),
        ("a.h", "/* Adds numbers\n * twice. */\n", "Adds numbers twice."),
        ("a.js", "// The list: open,\n// close. It is short.\n\nlet x;\n", "The list: open, close."),
    ],
)
def test_a_module_is_described_by_its_first_sentence(name: str, source: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(source, encoding="utf-8")
    assert first_sentence(tmp_path / name) == sentence


@pytest.mark.parametrize(("name", "source"), [("a.py", "x = 1\n"), ("a.js", "let x;\n"), ("a.c", "int x;\n")])
def test_a_module_without_a_sentence_is_an_error(name: str, source: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(source, encoding="utf-8")
    with pytest.raises(ValueError, match=f"{name} does not begin with a sentence"):
        first_sentence(tmp_path / name)


def test_lines_of_code_are_counted_without_blank_lines_comments_and_docstrings() -> None:
    source = '''"""Module.

Longer.
"""

import os  # counts

# does not


class A:
    """Class."""

    x = """a value
    of two lines"""

    def f(self):
        """Function."""
        return (
            1,
        )
'''
    assert code_lines(source) == 8
