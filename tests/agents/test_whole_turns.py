"""Agents do whole tasks: they look, change, fail, do two things at once, and end."""

import pytest

from tests.agents.programs import CALLERS
from tests.agents.script import Turn
from tests.agents.session import OpenSession

pytestmark = pytest.mark.agents

LEAST_CACHED = 0.95
"""Share of the prompt, from the second turn on."""
RESULT = "<tool_response>"


@pytest.mark.parametrize("name", CALLERS)
def test_a_file_is_read_changed_and_made(name: str, open_session: OpenSession) -> None:
    session = open_session(name)
    agent, notes = session.agent, session.path("notes.txt")
    (session.place.work / "notes.txt").write_text("one\ntwo\nthree\n")
    asked = session.run(
        "Mend the notes",
        Turn("Mend the notes", "<think>\nI look first.\n</think>\n\n" + agent.read(notes)),
        Turn(f"{RESULT}.*two", "Now I change it.\n" + agent.edit(notes, "two", "2")),
        Turn(RESULT, agent.shell("cat missing.txt")),
        Turn("No such file", agent.shell("echo a > a.txt") + "\n" + agent.shell("echo b > b.txt")),
        Turn(f"{RESULT}.*{RESULT}", agent.write(session.path("made.txt"), "Grüße, 世界\n")),
        Turn(RESULT, "All is done."),
    )
    assert session.text("notes.txt") == "one\n2\nthree\n"
    assert (session.text("a.txt"), session.text("b.txt")) == ("a\n", "b\n")
    assert session.text("made.txt").rstrip("\n") == "Grüße, 世界"
    assert "All is done." in session.output
    for each in asked[1:]:
        assert each.num_cached_tokens >= LEAST_CACHED * each.num_prompt_tokens


@pytest.mark.parametrize("name", CALLERS)
def test_a_long_output_is_cut_and_a_second_session_finds_the_first(name: str, open_session: OpenSession) -> None:
    session = open_session(name)
    first = session.run(
        "Count far",
        Turn("Count far", session.agent.shell("seq 1 200000")),
        Turn(RESULT, "Counted."),
    )
    assert first[1].num_prompt_tokens < first[0].num_prompt_tokens + 40_000  # the whole output has a million
    assert first[1].num_cached_tokens >= LEAST_CACHED * first[0].num_prompt_tokens
    (second,) = session.run("Say hello", Turn("Say hello", "Hello."))
    assert second.num_cached_tokens >= 0.9 * second.num_prompt_tokens
