"""The stored table: what becomes of each model type that transformers maps to a causal language model.

`python -m tests.architectures.table` serves all of them and rewrites it; with names, those alone. It writes nothing if
one is served wrongly.
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

import transformers

from tests.architectures.checkpoints import BUILT, OUTCOMES, write
from tests.architectures.serving import serve

PATH = Path(__file__).with_name("table.json")


class Entry(TypedDict):
    """An outcome: native, transformers or refused; no decoder or cannot be built; and what there is to say of it."""

    outcome: str
    detail: str


class Table(TypedDict):
    """The version of transformers that the table was made with, and an entry for each of its model types."""

    transformers: str
    entries: dict[str, Entry]


def load() -> Table:
    """The table as it is stored."""
    table: Table = json.loads(PATH.read_text(encoding="utf-8"))
    return table


def entry(name: str, root: Path) -> Entry:
    """Make the entry of one model type; its checkpoint lies in a folder of root meanwhile.

    Raises:
        WrongAnswerError: It is served wrongly.
    """
    if OUTCOMES[name] != BUILT:
        outcome, _, reason = OUTCOMES[name].partition(": ")
        return Entry(outcome=outcome, detail=reason)
    folder = write(name, root / name)
    served = serve(folder)
    shutil.rmtree(folder)
    return Entry(outcome=served.outcome, detail=served.detail)


def main(chosen: Sequence[str]) -> int:
    """Make the entries anew, tell of each, and store the table; returns the exit status."""
    entries = load()["entries"] if chosen else {}
    num_faults = 0
    with tempfile.TemporaryDirectory() as root:
        for name in chosen or OUTCOMES:
            try:
                entries[name] = entry(name, Path(root))
                print(f"{name}: {entries[name]['outcome']}, {entries[name]['detail']}", flush=True)
            except Exception as error:
                num_faults += 1
                print(f"{name}: FAULT, {type(error).__name__}: {error}", flush=True)
    if num_faults:
        return 1
    table = Table(transformers=transformers.__version__, entries=dict(sorted(entries.items())))
    PATH.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
