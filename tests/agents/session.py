"""One agent at work in a test, and what the server saw of it."""

import pathlib
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from tests.agents.programs import Agent, Place
from tests.agents.script import Asked, Turn, read_asked, read_lines, write_script
from tests.end_to_end.conftest import LiveServer


@dataclass
class Session:
    """An agent in a folder of its own."""

    agent: Agent
    server: LiveServer
    place: Place

    @property
    def folder(self) -> pathlib.Path:
        """Where script and records are."""
        return self.server.log.parent

    def path(self, name: str) -> str:
        """A file in the folder that the agent works in."""
        return str(self.place.work / name)

    def text(self, name: str) -> str:
        return (self.place.work / name).read_text()

    def follow(self, *turns: Turn) -> None:
        """What the model is to say from now on."""
        write_script(self.folder, uuid.uuid4().hex, list(turns))

    def run(self, task: str, *turns: Turn, resumes: bool = False) -> list[Asked]:
        """Run the agent on a task; returns the requests of the script, of which every turn was said."""
        self.follow(*turns)
        code = self.agent.run(self.place, task, resumes=resumes)
        asked = self.check(len(turns))
        assert code == 0, self.output
        return asked

    def check(self, num_turns: int) -> list[Asked]:
        """No request was refused, no grammar was in the way, and every turn was said, in order."""
        refused = [line for line in read_lines(self.folder / "http.jsonl") if "error" in line]
        asked = read_asked(self.folder)
        faults = [fault for each in asked for fault in each.faults]
        assert not refused and not faults, (refused, faults)
        scripted = [each for each in asked if each.turn is not None]
        turns = [each.turn for each in scripted]
        assert turns == list(range(num_turns)), (
            turns,
            [each.prompt[-300:] for each in asked],
            self.output,
        )
        return scripted

    @property
    def output(self) -> str:
        return (self.place.home / "output.txt").read_text()


OpenSession = Callable[[str], Session]
"""Makes the session of an agent by its name."""
