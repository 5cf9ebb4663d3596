"""What cuts a session short: a user who ends it, and a context that is full."""

import signal
from dataclasses import replace

import pytest

from tests.agents.programs import CALLERS, end, wait_for
from tests.agents.script import Turn, read_asked
from tests.agents.session import OpenSession

pytestmark = pytest.mark.agents

RESULT = "<tool_response>"
ASKS_FOR_SUMMARY = "detailed summary|<state_snapshot>|summary process|COMPACTION"
"""Words with which Claude Code, qwen-code, opencode and Codex do."""
SUMMARY = "<summary>\n<state_snapshot>\nAll is counted, made.txt is missing.\n</state_snapshot>\n</summary>"


@pytest.mark.parametrize("name", CALLERS)
def test_an_answer_that_is_interrupted_frees_its_request_and_the_session_goes_on(
    name: str, open_session: OpenSession
) -> None:
    session = open_session(name)
    session.follow(
        Turn("Begin slowly", session.agent.shell("echo 1 > begun.txt")), Turn(RESULT, "Then I tell", lasts=True)
    )
    process = session.agent.start(session.place, "Begin slowly")
    try:
        wait_for(lambda: len([each for each in read_asked(session.folder) if each.turn == 1]))
    finally:
        end(process, signal.SIGINT)
    session.server.wait_for_metric("weft:num_requests_running", 0)
    assert session.text("begun.txt") == "1\n"
    before = session.check(2)
    (go_on, last) = session.run(
        "Go on now",
        Turn("Go on now", session.agent.shell("echo 2 > ended.txt")),
        Turn(RESULT, "Ended."),
        resumes=True,
    )
    assert session.text("ended.txt") == "2\n"
    assert go_on.num_prompt_tokens > before[0].num_prompt_tokens
    assert last.num_cached_tokens >= 0.95 * last.num_prompt_tokens


@pytest.mark.parametrize("name", CALLERS)
def test_a_full_context_is_compacted_and_the_work_goes_on(name: str, open_session: OpenSession) -> None:
    session = open_session(name)
    full = session.run(
        "Count far", Turn("Count far", session.agent.shell("seq 1 5000")), Turn(RESULT, "All is counted.")
    )
    session.place = replace(session.place, is_small=True)
    asked = session.run(
        "Go on now",
        Turn(ASKS_FOR_SUMMARY, SUMMARY, needs_tools=False),
        Turn("", session.agent.shell("echo made > made.txt")),
        Turn(RESULT, "Done."),
        resumes=True,
    )
    assert session.text("made.txt") == "made\n"
    assert "made.txt is missing" in asked[-1].prompt
    assert asked[-1].num_prompt_tokens < full[-1].num_prompt_tokens
