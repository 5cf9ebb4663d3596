"""aider writes its changes as text, and smolagents calls tools or writes code."""

import subprocess

import pytest

from tests.agents.script import Turn, call
from tests.agents.session import OpenSession

pytestmark = pytest.mark.agents

CHANGE = """\
I change one line.

sums.py
```python
<<<<<<< SEARCH
    return a - b
=======
    return {right}
>>>>>>> REPLACE
```
"""
MAKE = """\
made.txt
```
<<<<<<< SEARCH
=======
hello
>>>>>>> REPLACE
```
"""


def test_aider_changes_a_file_and_mends_what_its_tests_show(open_session: OpenSession) -> None:
    session = open_session("aider")
    (session.place.work / "sums.py").write_text("def add(a, b):\n    return a - b\n")
    asked = session.run(
        "Mend the sum",
        Turn("Mend the sum", CHANGE.format(right="a * b"), needs_tools=False),
        Turn("AssertionError", CHANGE.format(right="a + b").replace("a - b", "a * b") + "\n" + MAKE, needs_tools=False),
    )
    assert session.text("sums.py") == "def add(a, b):\n    return a + b\n"
    assert session.text("made.txt") == "hello\n"
    assert asked[1].num_cached_tokens > 0.5 * asked[0].num_prompt_tokens
    log = subprocess.run(
        ["git", "log", "--oneline"], cwd=session.place.work, capture_output=True, text=True, check=True
    )
    assert len(log.stdout.splitlines()) >= 2


def test_smolagents_calls_tools(open_session: OpenSession) -> None:
    session = open_session("smolagents-tools")
    asked = session.run(
        "Make and read a file",
        Turn("Make and read", call("write_file", name="made.txt", text="hello\n")),
        Turn("is written", call("read_file", name="missing.txt")),
        Turn("No such file", call("read_file", name="made.txt") + "\n" + call("write_file", name="b.txt", text="b")),
        Turn("b.txt is written", call("final_answer", answer="It holds hello.")),
    )
    assert (session.text("made.txt"), session.text("b.txt")) == ("hello\n", "b")
    assert "answer: It holds hello." in session.output
    for each in asked[1:]:
        assert each.num_cached_tokens > 0.8 * each.num_prompt_tokens


def test_smolagents_writes_code(open_session: OpenSession) -> None:
    session = open_session("smolagents-code")
    code = '<code>\nwrite_file(name="made.txt", text="hello")\nprint(read_file(name="made.txt"))\n</code>'
    session.run(
        "Make and read a file",
        Turn("Make and read", f"Thought: I write it.\n{code}", needs_tools=False),
        Turn("hello", 'Thought: I am done.\n<code>\nfinal_answer("It holds hello.")\n</code>', needs_tools=False),
    )
    assert session.text("made.txt") == "hello"
    assert "answer: It holds hello." in session.output
