"""What Weft makes of real models beside transformers in float32 on the same weights: `make bench BENCH=real_quality`.

The models are those of `make real`. Text of about 2,000 tokens is predicted, and short prompts are continued greedily,
by every form of weights and cache that Weft has on this machine; with `--llama-python` by llama.cpp as well. Vectors of
odd lines are compared with those of sentence-transformers. Figures say nothing of speed, so the machine may be busy.
"""

import argparse
import dataclasses
import datetime
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.compare import machine, servers
from benchmarks.compare.workloads import Workload
from benchmarks.embeddings import START_S, post
from tests.real.decoders import FORMS, Closeness, Reference, Served, closeness, passages, prompts
from tests.real.fetch import DECODERS, ENCODERS, default_folder
from tests.real.lines import odd_lines
from weft.engine.wire.errors import ModelError

SCRATCH = pathlib.Path("build/bench")
NAMES = {"SmolLM2-135M-Instruct.Q4_1": "SmolLM2 135M, Q4_1", "gemma-3-270m-q4_k_m": "Gemma 3 270M, Q4_K_M"}

LLAMA_CPP: dict[str, tuple[str, ...]] = {"llama.cpp": (), "llama.cpp, `-ctk q8_0 -ctv q8_0`": ("q8_0",)}
"""Ways in which llama.cpp can keep K and V, as arguments of llama_logits.py."""


@dataclasses.dataclass(frozen=True, slots=True)
class Figure:
    """One line: a model in one form, and how close it is to the reference.

    Attributes:
        greedy: Of `num_prompts` continuations, how many are the reference's, token by token.
    """

    model: str
    form: str
    closeness: Closeness
    greedy: int
    num_prompts: int


@dataclasses.dataclass(frozen=True, slots=True)
class Vectors:
    """One line: the vectors of an encoder in one dtype beside sentence-transformers' in float32.

    Attributes:
        cosine: The smallest of all texts.
        difference: The largest between two values.
    """

    model: str
    form: str
    num_texts: int
    cosine: float
    difference: float


class Kept:
    """The reference's log-probabilities of all passages, on disk: those of a large vocabulary take gigabytes."""

    def __init__(self, file: pathlib.Path, folder: pathlib.Path) -> None:
        """Compute them."""
        self.texts, model = passages(file), Reference(file)
        self.prompts = prompts(self.texts)
        self.greedy = model.greedy(self.prompts)
        self._files = [folder / f"reference-{index}.npy" for index in range(len(self.texts))]
        for text, path in zip(self.texts, self._files, strict=True):
            np.save(path, model.log_probabilities(text).numpy())

    def compare(self, other: Callable[[int], torch.Tensor], greedy: Sequence[Sequence[int]]) -> tuple[Closeness, int]:
        """How close another's log-probabilities of each passage are, and how many of its continuations are the same."""

        def pairs() -> Iterator[tuple[list[int], torch.Tensor, torch.Tensor]]:
            for index, (text, path) in enumerate(zip(self.texts, self._files, strict=True)):
                yield text, torch.from_numpy(np.load(path)), other(index)

        return closeness(pairs()), sum(a == b for a, b in zip(self.greedy, greedy, strict=True))


def weft(kept: Kept, file: pathlib.Path, options: dict[str, str]) -> tuple[Closeness, int]:
    """Of Weft in one form. Raises ModelError if the model cannot have it here."""
    served = Served(file, **options)
    return kept.compare(lambda index: served.log_probabilities(kept.texts[index]), served.greedy(kept.prompts))


def llama_cpp(
    kept: Kept, file: pathlib.Path, python: pathlib.Path, folder: pathlib.Path, flags: Sequence[str]
) -> tuple[Closeness, int]:
    """Of llama.cpp, in a process of its own; see llama_logits.py."""
    question = {"passages": kept.texts, "prompts": kept.prompts, "num_output_tokens": len(kept.greedy[0])}
    program = pathlib.Path(__file__).with_name("llama_logits.py")
    command = [str(python), str(program), str(file), str(folder), *flags]
    answer = subprocess.run(command, input=json.dumps(question), stdout=subprocess.PIPE, text=True, check=True)

    def log_probabilities(index: int) -> torch.Tensor:
        return torch.from_numpy(np.load(folder / f"llama-{index}.npy")).log_softmax(-1)

    return kept.compare(log_probabilities, json.loads(answer.stdout))


def measure(file: pathlib.Path, options: argparse.Namespace, console: Console) -> Iterator[Figure]:
    """All forms of a model."""
    with tempfile.TemporaryDirectory(dir=options.out) as scratch:
        folder, name = pathlib.Path(scratch), NAMES.get(file.stem, file.stem)
        kept = Kept(file, folder)
        for form, engine_options in FORMS.items():
            try:
                found = weft(kept, file, engine_options)
            except ModelError as error:
                console.print(f"{name}: {form}: {error}")
                continue
            yield Figure(name, form, *found, len(kept.prompts))
        for form, flags in LLAMA_CPP.items() if options.llama_python else ():
            yield Figure(name, form, *llama_cpp(kept, file, options.llama_python, folder, flags), len(kept.prompts))


def measure_vectors(folder: pathlib.Path, out: pathlib.Path) -> Iterator[Vectors]:
    """Both dtypes of an encoder, over HTTP."""
    from sentence_transformers import SentenceTransformer

    texts = odd_lines()[::5]
    expected = SentenceTransformer(str(folder), device="cpu").encode(texts, show_progress_bar=False)
    for dtype in ("float32", "bfloat16"):
        flags = ("--device", "cpu", "--dtype", dtype, "--served-model-name", "bert")
        server = servers.weft({"bert": folder}, flags=flags)
        group = [Workload("E", "embeddings", "bert", 1, 1, 1, 0)]
        with servers.running(server, group, out / f"{folder.name}-{dtype}.log", START_S) as running:
            found = post(running.url, texts)
        cosines = (found * expected).sum(-1) / (np.linalg.norm(found, axis=-1) * np.linalg.norm(expected, axis=-1))
        difference = float(np.abs(found - expected).max())
        yield Vectors(folder.name, f"`--dtype {dtype}`", len(texts), float(cosines.min()), difference)


def table(figures: Sequence[Figure]) -> Table:
    """For a terminal."""
    result = Table()
    for title in ("", "KL divergence", "mean |d log p|", "perplexity", "same top token", "greedy outputs equal"):
        result.add_column(title, justify="right" if title else "left")
    for figure in figures:
        close = figure.closeness
        cells = f"{close.divergence:.5f}", f"{close.difference:.5f}", f"{close.growth:+.3%}", f"{close.same_top:.2%}"
        result.add_row(f"{figure.model}: {figure.form}", *cells, f"{figure.greedy} of {figure.num_prompts}")
    return result


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser("python -m benchmarks.real_quality", description=__doc__)
    parser.add_argument(
        "--folder", type=pathlib.Path, default=default_folder(), help="of `make real` (default: %(default)s)"
    )
    parser.add_argument("--files", nargs="*", default=DECODERS, help="GGUF files in it (default: %(default)s)")
    parser.add_argument("--encoders", nargs="*", default=ENCODERS, help="folders in it (default: %(default)s)")
    parser.add_argument("--llama-python", type=pathlib.Path, help="interpreter with llama-cpp-python")
    parser.add_argument("--out", type=pathlib.Path, default=SCRATCH, help=f"folder of the results (default: {SCRATCH})")
    options, console = parser.parse_args(), Console()
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ.pop("WEFT_REAL", None)  # the servers would refuse it as a setting
    here, figures = machine.describe(), list[Figure]()
    for name in options.files:
        for figure in measure(options.folder / name, options, console):
            figures.append(figure)
            console.print(f"{figure.model}: {figure.form}: KL divergence {figure.closeness.divergence:.5f}")
    console.print(table(figures))
    vectors = [line for name in options.encoders for line in measure_vectors(options.folder / name, options.out)]
    for line in vectors:
        console.print(f"{line.model}: {line.form}: cosine {line.cosine:.6f}, difference {line.difference:.6f} at most")
    done = {
        "date": datetime.date.today().isoformat(),
        "command": f"make bench BENCH=real_quality ARGS='{' '.join(sys.argv[1:])}'",
        "machine": dataclasses.asdict(here),
        "figures": [dataclasses.asdict(figure) for figure in figures],
        "vectors": [dataclasses.asdict(line) for line in vectors],
    }
    (options.out / "real-quality.json").write_text(json.dumps(done, indent=1) + "\n")


if __name__ == "__main__":
    main()
