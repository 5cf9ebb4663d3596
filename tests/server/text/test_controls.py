import pytest

from weft.server.text.shield import strip_controls


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("a\x1b[2Jb", "a[2Jb"),
        ("a\rb\x07\x08", "ab"),
        ("\x9b2Ja\x85b\x7f", "2Jab"),
        ("\u202etxt.exe\u2066", "txt.exe"),
        ("half \ud83d", "half "),
        ("keeps\n\tthese: é 👩\u200d🚀", "keeps\n\tthese: é 👩\u200d🚀"),
    ],
)
def test_nothing_is_left_that_moves_the_cursor(text: str, safe: str) -> None:
    assert strip_controls(text) == safe
