"""What the model says in a test: turns, said in order, when the end of a prompt asks for them.

The test writes a script into a folder, and the engine process reads it there and writes down what it was asked.
"""

import json
import pathlib
import re
from dataclasses import asdict, dataclass, field

FOLDER = "WEFT_TESTS_SCRIPT"
"""Environment variable with the folder."""

LAST_TURN = "<|im_start|>user\n"
TOOLS = "<tools>"
ELSEWHERE = "Fine."
"""Said to a prompt without tools (a title, a summary), unless a turn is meant for it."""


@dataclass(frozen=True)
class Turn:
    """What is said, and behind what: a pattern that is found in the last turn of the user, results of tools included.

    Attributes:
        needs_tools: Whether the prompt must show tools. Agents ask for a title with the task's words, without tools.
        lasts: Says that the answer goes on, after its text, with words until the client leaves.
    """

    after: str
    say: str
    needs_tools: bool = True
    lasts: bool = False

    def fits(self, end_of_prompt: str, *, has_tools: bool) -> bool:
        return has_tools >= self.needs_tools and bool(re.search(self.after, end_of_prompt, re.DOTALL))


@dataclass
class Asked:
    """A request that the engine ran: its number of turn in the script, or None; and what of its prompt was cached."""

    turn: int | None
    num_prompt_tokens: int
    num_cached_tokens: int
    faults: list[str] = field(default_factory=list)
    prompt: str = ""


class Script:
    """The script of the running test, as the engine process sees it."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        self._name = ""
        self._num_said = 0

    def choose(self, prompt: str) -> tuple[int | None, Turn]:
        """The next turn, if the prompt asks for it."""
        script = json.loads((self._folder / "script.json").read_text())
        if script["name"] != self._name:
            self._name, self._num_said = script["name"], 0
        end = prompt[prompt.rfind(LAST_TURN) :]
        turns = [Turn(**each) for each in script["turns"]]
        if self._num_said < len(turns) and turns[self._num_said].fits(end, has_tools=TOOLS in prompt):
            self._num_said += 1
            return self._num_said - 1, turns[self._num_said - 1]
        return None, Turn("", ELSEWHERE)

    def note(self, asked: Asked) -> None:
        with (self._folder / "asked.jsonl").open("a") as lines:
            lines.write(json.dumps(asdict(asked)) + "\n")


def write_script(folder: pathlib.Path, name: str, turns: list[Turn]) -> None:
    """Begin a test; the name tells its script from that of the test before."""
    for record in folder.glob("*.jsonl"):
        record.unlink()
    (folder / "new.json").write_text(json.dumps({"name": name, "turns": [asdict(turn) for turn in turns]}))
    (folder / "new.json").rename(folder / "script.json")


def read_asked(folder: pathlib.Path) -> list[Asked]:
    return [Asked(**line) for line in read_lines(folder / "asked.jsonl")]


def read_lines(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def call(name: str, /, **arguments: object) -> str:
    """A call as Qwen3 writes it."""
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) + "\n</tool_call>"
