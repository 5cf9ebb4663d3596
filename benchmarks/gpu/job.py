"""What the command and its workers tell each other: a job, and messages in a file.

Imports nothing that takes time, since every process of the benchmark imports it.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from benchmarks.gpu.rows import Ceiling, Measurement, Sizes


class UnavailableError(Exception):
    """Something cannot be measured here; says why."""


@dataclass(frozen=True, slots=True)
class Job:
    """What a worker is to do.

    Attributes:
        rows: Keys of the rows of the group that are wanted.
        device: cuda or cpu.
        scratch: Folder for models, messages and logs.
    """

    group: str
    rows: tuple[str, ...]
    sizes: Sizes
    device: str
    scratch: pathlib.Path

    @property
    def messages(self) -> pathlib.Path:
        """The file of the `Reporter`."""
        return self.scratch / f"{self.group}.messages"

    @property
    def log(self) -> pathlib.Path:
        """Where the worker's output goes."""
        return self.scratch / f"{self.group}.log"

    def write(self) -> pathlib.Path:
        """Write the job down for a worker."""
        path = self.scratch / f"{self.group}.json"
        path.write_text(json.dumps(dataclasses.asdict(self), default=str))
        return path

    @classmethod
    def read(cls, path: pathlib.Path) -> "Job":
        """What `write` wrote."""
        values = json.loads(path.read_text())
        sizes = {key: tuple(value) if isinstance(value, list) else value for key, value in values["sizes"].items()}
        return cls(
            values["group"], tuple(values["rows"]), Sizes(**sizes), values["device"], pathlib.Path(values["scratch"])
        )


class Reporter:
    """Appends messages to the job's file."""

    def __init__(self, path: pathlib.Path) -> None:
        """Take note of the file."""
        self._path = path
        self.reported: set[str] = set()

    def measured(
        self, row: str, value: float, work: Mapping[Ceiling, float] = MappingProxyType({}), **details: Any
    ) -> None:
        """Report the figure of a row; see `Measurement`."""
        self.reported.add(row)
        self._put(measured={"row": row, "value": value, "work": dict(work), "details": details})

    def unavailable(self, row: str, why: str) -> None:
        """Report that a row has no figure."""
        self.reported.add(row)
        self._put(fault={"row": row, "why": why})

    def note(self, name: str, values: Any) -> None:
        """Report what belongs to no row: ceilings, the machine, how the time of a step is split."""
        self._put(note={"name": name, "values": values})

    def progress(self, text: str) -> None:
        """Say what is being done."""
        self._put(progress=text)

    def _put(self, **message: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(message) + "\n")


@dataclass(slots=True)
class Findings:
    """What the messages of workers come to."""

    measurements: dict[str, Measurement] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    progress: str = ""

    def take(self, line: str) -> None:
        """Take in one message."""
        message = json.loads(line)
        if "measured" in message:
            measurement = Measurement(**message["measured"])
            self.measurements[measurement.row] = measurement
        elif "fault" in message:
            self.faults[message["fault"]["row"]] = message["fault"]["why"]
        elif "note" in message:
            self.notes[message["note"]["name"]] = message["note"]["values"]
        else:
            self.progress = message["progress"]
