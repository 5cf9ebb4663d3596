"""What speculation brings to real models, on edits of code and on prose: `make bench BENCH=edits`.

    python -m benchmarks.edits --runs 3 --out benchmarks/results/edits.json

`make real` fetches the models. An edit is a function of this repository, then the beginning of its copy with a name
changed, which the model goes on with, greedily. Prose is a text that it continues at temperature 1, where there is
little to guess; small models repeat themselves at 0. For a model in bfloat16 its own weights in 4 bits draft, too. One
stream, in this process and without HTTP, by engines in turns, which must give the same ids.
"""

import argparse
import dataclasses
import datetime
import json
import pathlib
import shlex
import statistics
import sys

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.compare import machine
from benchmarks.other_form import DRAFTERS, gguf_file
from benchmarks.real import files
from benchmarks.real_quality import NAMES
from benchmarks.speculation import answer
from weft.engine.gguf.folder import made_folder
from weft.engine.loop.engine import Engine
from weft.engine.start.startup import start
from weft.engine.wire.messages import EngineOptions
from weft.engine.wire.params import SamplingParams
from weft.server.text.tokenizer import Tokenizer

ROOT = pathlib.Path(__file__).parents[1]
EDITS = (  # file, from where, to where, old and new name
    ("benchmarks/compare/figures.py", "def figures", "    return Figures", "streams", "replies"),
    ("benchmarks/compare/servers.py", "def running", "        try:", "process", "child"),
    ("benchmarks/compare/load.py", "    def feed", "    def _read_event", "data", "received"),
)
MODELS = (*NAMES, *DRAFTERS)
PROSE = "prose"
PLAIN = "plain"
TEXT = ROOT / "tests/real/text.md"
NUM_PROSE_CHARACTERS = 1_500
NUM_BEGUN_LINES = 4
"""Of a copy, which show what is changed."""

NUM_OUTPUT_TOKENS = 192
NUM_THREADS = torch.get_num_threads()


@dataclasses.dataclass(frozen=True, slots=True)
class Figure:
    """Tokens per second of one prompt.

    Attributes:
        speeds: By round, of each source of drafts; the first has none.
    """

    model: str
    task: str
    speeds: dict[str, list[float]]

    @property
    def gains(self) -> dict[str, float]:
        """Of the medians."""
        plain, *others = ((side, statistics.median(each)) for side, each in self.speeds.items())
        return {side: speed / plain[1] for side, speed in others}


def prompts() -> dict[str, str]:
    """By task."""
    found = {}
    for file, first, last, old, new in EDITS:
        text = (ROOT / file).read_text(encoding="utf-8")
        begin = text.index(first)
        code = text[begin : text.index(last, begin)]
        begun = "".join(code.replace(old, new).splitlines(keepends=True)[:NUM_BEGUN_LINES])
        found[f"edit of {pathlib.Path(file).name}"] = f"{code}\n\n# The same with {new} instead of {old}:\n\n{begun}"
    found[PROSE] = TEXT.read_text(encoding="utf-8")[:NUM_PROSE_CHARACTERS]
    return found


def engine(folder: pathlib.Path, speculative: str | None) -> Engine:
    """One that computes every prompt anew."""
    torch.set_num_threads(NUM_THREADS)  # the engine before this one has left torch a single one
    options = EngineOptions(model=str(folder), max_model_len=4096, prefix_caching=False, speculative=speculative)
    return start(options, "benchmark").engine


def measure(name: str, file: pathlib.Path, runs: int) -> list[Figure]:
    """All figures of one model; the first round does not count."""
    folder = made_folder(file)
    sources = {PLAIN: None, "n-gram": "ngram"}
    if name in DRAFTERS:
        sources["its 4 bits"] = str(made_folder(gguf_file(DRAFTERS[name])))
    tokenizer, sides = Tokenizer.load(folder), {side: engine(folder, source) for side, source in sources.items()}
    figures = []
    for task, text in track(prompts().items(), name):
        heat = 1.0 if task == PROSE else 0.0
        params = SamplingParams(temperature=heat, seed=7, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)
        ids = tokenizer.encode(text)
        speeds: dict[str, list[float]] = {side: [] for side in sides}
        for number in range(runs + 1):
            made = {side: answer(of_side, ids, params, []) for side, of_side in sides.items()}
            assert all(found == made[PLAIN][0] for found, _ in made.values()), "speculation changed the answer"
            if number:
                for side, (_, speed) in made.items():
                    speeds[side].append(speed)
        figures.append(Figure(name, task, speeds))
    return figures


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser("python -m benchmarks.edits", description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="rounds, of which medians are taken (default: 3)")
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated (default: %(default)s)")
    parser.add_argument("--out", type=pathlib.Path, help="file for results that are kept")
    options = parser.parse_args()
    machine.refuse_changes(parser, options.out)
    paths, here = files(parser, options.models), machine.describe()
    figures = [figure for name, file in paths.items() for figure in measure(name, file, options.runs)]
    shown = Table("", "", "", "tok/s", "")
    for figure in figures:
        for side, speeds in figure.speeds.items():
            gain = f"{figure.gains[side]:.2f}x" if side in figure.gains else ""
            shown.add_row(figure.model, figure.task, side, f"{statistics.median(speeds):.0f}", gain)
    Console().print(shown)
    if options.out:
        done = {
            "date": datetime.date.today().isoformat(),
            "command": f"make bench BENCH=edits ARGS={shlex.quote(shlex.join(sys.argv[1:]))}",
            "machine": dataclasses.asdict(here),
            "figures": [dataclasses.asdict(figure) for figure in figures],
        }
        options.out.write_text(json.dumps(done, indent=1) + "\n")


if __name__ == "__main__":
    main()
