"""benchmarks/edits: prompts of this repository, and the gain."""

from benchmarks.edits import EDITS, PROSE, Figure, prompts


def test_an_edit_shows_the_code_and_how_its_copy_begins() -> None:
    found = prompts()
    assert list(found)[-1] == PROSE
    assert len(found) == len(EDITS) + 1
    for text, (_, _, _, old, new) in zip(found.values(), EDITS, strict=False):
        code, begun = text.split(f"# The same with {new} instead of {old}:\n\n")
        assert code.count(old) > 3
        assert code.replace(old, new).startswith(begun)
        assert 0 < len(begun) < len(code) / 2


def test_the_gain_is_that_of_the_medians() -> None:
    speeds = {"plain": [10.0, 20.0, 90.0], "n-gram": [30.0, 1.0, 31.0], "its 4 bits": [10.0]}
    assert Figure("m", PROSE, speeds).gains == {"n-gram": 1.5, "its 4 bits": 0.5}
