"""Rewrites the generated parts of the README and of the pages in this folder: `make docs`.

A part lies between `<!-- generated: NAME -->` and `<!-- /generated: NAME -->`. Everything else is written by hand and
stays as it is. The tests check that every part is up to date and stands in one place.
"""

import json
import re
import textwrap
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.compare.report import format_value
from docs.architectures import render_architectures, render_data
from docs.formats import render_formats
from docs.habit_parameters import LLAMA_CPP_REMARKS, LLAMA_CPP_ROUTES, OLLAMA_REMARKS, OLLAMA_ROUTES
from docs.parameters import (
    CONVERSATION_REMARKS,
    CONVERSATION_ROUTES,
    DECISION_REMARKS,
    DECISION_ROUTES,
    MESSAGES_REMARKS,
    MESSAGES_ROUTES,
    SPEECH_REMARKS,
    SPEECH_ROUTES,
    VECTOR_REMARKS,
    VECTOR_ROUTES,
)
from docs.parameters import render_table as render_parameters
from docs.structure import render_folders, render_reading_path
from weft.server.cli.tables import render_table as render_settings

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))

_PART = re.compile(r"<!-- generated: (\S+) -->\n.*?<!-- /generated: \1 -->", re.DOTALL)


def update(page: str, parts: Mapping[str, Callable[[], str]]) -> str:
    """Return the page with its generated parts made anew.

    Raises:
        KeyError: The page has a part of another name.
    """
    return _PART.sub(lambda m: f"<!-- generated: {m[1]} -->\n{parts[m[1]]()}<!-- /generated: {m[1]} -->", page)


def render_figures(run: Path) -> str:
    """The table of a stored run: medians, and in brackets the first server's divided by each other server's."""
    report = json.loads(run.read_text(encoding="utf-8"))
    first, *others = report["servers"]
    lines = [f"| | {' | '.join(report['servers'])} |", "| --- |" + " ---: |" * len(report["servers"])]
    for line in report["lines"]:
        medians, unit = line["medians"], line["row"]["unit"]
        ratios = [f"{format_value(medians[name], unit)} ({medians[first] / medians[name]:.2f}x)" for name in others]
        cells = [line["row"]["title"], format_value(medians[first], unit), *ratios]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def render_vectors(run: Path) -> str:
    """The table of a stored run of vectors: medians, and how many times as fast as sentence-transformers a side is."""
    report = json.loads(run.read_text(encoding="utf-8"))
    lines = ["| | texts/s | | CPU time a text | |", "| --- | ---: | ---: | ---: | ---: |"]
    for figures in report["figures"]:
        sides = dict.fromkeys(turn["side"] for turn in figures["turns"])
        wall, cpu = (
            {side: median(turn[key] for turn in figures["turns"] if turn["side"] == side) for side in sides}
            for key in ("wall_s", "cpu_s")
        )
        count = figures["num_texts"]
        for side in sides:
            ratios = (f"{each[_REFERENCE] / each[side]:.2f}x" for each in (wall, cpu))
            cells = (f"{count / wall[side]:.2f}", next(ratios), f"{cpu[side] / count * 1e3:.0f} ms", next(ratios))
            lines.append(f"| {figures['dtype']}: {side} | {' | '.join(cells)} |")
        lines.append(
            f"| {figures['dtype']}: its matrix products alone, by torch | {count / figures['products_s']:.2f} | | | |"
        )
    return "\n".join(lines) + "\n"


def render_steps(run: Path) -> str:
    """The table of a stored run of decode steps, beside what memory allows and llama.cpp."""
    lines = ["| | streams | step | to the reads alone | llama.cpp |", "| --- | ---: | ---: | ---: | ---: |"]
    for figure in json.loads(run.read_text(encoding="utf-8"))["figures"]:
        step, peer = figure["step_ms"], figure["llama_ms"]
        beside = f"{peer:.1f} ms ({step / peer:.2f}x)" if peer else ""
        cells = (figure["model"], str(figure["streams"]), f"{step:.1f} ms", f"{figure['ratio']:.2f}x", beside)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def render_files(run: Path) -> str:
    """The table of a stored run of GGUF files, beside llama.cpp."""
    lines = ["| | | Weft | llama.cpp |", "| --- | --- | ---: | ---: |"]
    for figure in json.loads(run.read_text(encoding="utf-8"))["figures"]:
        own, peer = figure["weft_ms"], figure["llama_ms"]
        lines.append(f"| {figure['file']} | {figure['what']} | {own:.1f} ms | {peer:.1f} ms ({own / peer:.2f}x) |")
    return "\n".join(lines) + "\n"


def render_served(run: Path) -> str:
    """The table of a stored run of real files: medians, and in brackets the first server's divided by the other's."""
    report = json.loads(run.read_text(encoding="utf-8"))
    models = list(dict.fromkeys(figure["model"] for figure in report["figures"]))
    heads = [f"{model}: {server}" for model in models for server in report["servers"]]
    rows: dict[str, list[str]] = {}
    for figure in sorted(report["figures"], key=lambda figure: models.index(figure["model"])):
        cells = rows.setdefault(figure["title"], [])
        first, *others = (figure["values"].get(server) for server in report["servers"])
        cells.append(format_value(median(first), figure["unit"]) if first else "-")
        for values in others:
            cell = format_value(median(values), figure["unit"]) if values else "-"
            cells.append(f"{cell} ({median(first) / median(values):.2f}x)" if first and values else cell)
    lines = [f"| | {' | '.join(heads)} |", "| --- |" + " ---: |" * len(heads)]
    return "\n".join([*lines, *(f"| {title} | {' | '.join(cells)} |" for title, cells in rows.items())]) + "\n"


def render_edits(run: Path) -> str:
    """The table of a stored run of speculation: medians, and the gains."""
    figures = json.loads(run.read_text(encoding="utf-8"))["figures"]
    sides = max((list(figure["speeds"]) for figure in figures), key=len)
    lines = [f"| | | {' | '.join(sides)} |", "| --- | --- |" + " ---: |" * len(sides)]
    for figure in figures:
        plain, *others = (median(figure["speeds"][side]) if side in figure["speeds"] else 0 for side in sides)
        gains = (f"{format_value(each, 'tok/s')} ({each / plain:.2f}x)" if each else "-" for each in others)
        lines.append(f"| {' | '.join((figure['model'], figure['task'], format_value(plain, 'tok/s'), *gains))} |")
    return "\n".join(lines) + "\n"


def render_quality(run: Path) -> str:
    """The table of a stored run of forms of weights."""
    lines = [
        "| | bits a weight | KL divergence | perplexity of answers | same greedy choice |",
        "| --- |" + " ---: |" * 4,
    ]
    for figure in json.loads(run.read_text(encoding="utf-8"))["figures"]:
        cells = (
            f"{figure['bits']:.2f}",
            f"{figure['kl']:.4f}",
            f"{figure['answers']:+.2%}",
            f"{figure['same_choice']:.1%}",
        )
        lines.append(f"| {figure['form']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def render_real(run: Path) -> str:
    """The tables of a stored run of real models: what decoders predict, and the vectors of encoders."""
    report = json.loads(run.read_text(encoding="utf-8"))
    titles = ("KL divergence", "mean \\|Δ log p\\|", "perplexity", "same top token", "greedy outputs equal")
    lines = [f"| | {' | '.join(titles)} |", "| --- |" + " ---: |" * len(titles)]
    for figure in report["figures"]:
        close = figure["closeness"]
        cells = (
            f"{close['divergence']:.4f}",
            f"{close['difference']:.4f}",
            f"{close['growth']:+.2%}",
            f"{close['same_top']:.1%}",
            f"{figure['greedy']} of {figure['num_prompts']}",
        )
        lines.append(f"| {figure['model']}: {figure['form']} | {' | '.join(cells)} |")
    lines += ["", "| | texts | smallest cosine | largest difference of a value |", "| --- |" + " ---: |" * 3]
    for vectors in report["vectors"]:
        cells = (str(vectors["num_texts"]), f"{vectors['cosine']:.6f}", f"{vectors['difference']:.6f}")
        lines.append(f"| {vectors['model']}: {vectors['form']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def render_correctness(run: Path) -> str:
    """What the README says of a stored run of real models, in a paragraph."""
    report = json.loads(run.read_text(encoding="utf-8"))
    exact = [figure for figure in report["figures"] if "float32" in figure["form"]]
    same, number = (sum(figure[key] for figure in exact) for key in ("greedy", "num_prompts"))
    models = " and ".join(figure["model"] for figure in exact)
    served = [
        f"{figure['closeness']['divergence']:.4f} ({figure['model']})"
        for figure in report["figures"]
        if figure["form"] == "as it comes"
    ]
    cosine = min(vectors["cosine"] for vectors in report["vectors"])
    text = (
        "Correctness, on [real models](docs/models.md#real-models) beside transformers in float32: "
        f"of {models} in float32 {same} of {number} greedy outputs are equal token by token. As served, the KL "
        f"divergence is {' and '.join(served)}. Vectors have a cosine of {cosine:.5f} or more with "
        "sentence-transformers'."
    )
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False) + "\n"


def render_starts(run: Path) -> str:
    """The table of a stored run of starts: medians, beside Python loading torch."""
    report = json.loads(run.read_text(encoding="utf-8"))
    titles = ("ready", "first answer begins", "CPU time until ready", "first token of later chats")
    lines = [f"| | {' | '.join(titles)} |", "| --- |" + " ---: |" * len(titles)]
    for name, each in report["median"].items():
        cells = [f"{each[key]:.2f} s" for key in ("ready_s", "answered_s", "cpu_s")]
        lines.append(f"| {name} | {' | '.join(cells)} | {each['later_s'] * 1000:.1f} ms |")
    return "\n".join([*lines, f"| `import torch` alone | {report['torch_s']:.2f} s | | | |"]) + "\n"


def render_seq2seq(run: Path) -> str:
    """The table of a stored run of models with an encoder: medians beside transformers."""
    report = json.loads(run.read_text(encoding="utf-8"))
    lines = ["| | at once | Weft | transformers | |", "| --- | ---: | ---: | ---: | ---: |"]
    for name, by_count in report["seconds"].items():
        for count, each in by_count.items():
            ours, others = (median(each[key]) for key in ("weft", "transformers"))
            lines.append(f"| {name} | {count} | {ours:.2f} s | {others:.2f} s | {others / ours:.2f}x |")
    return "\n".join(lines) + "\n"


def render_pictures(run: Path) -> str:
    """The table of a stored run of a model that sees: medians."""
    figures = json.loads(run.read_text(encoding="utf-8"))["figures"]
    return "| | |\n| --- | ---: |\n" + "".join(
        f"| {name} | {f'{m:,.0f}' if (m := median(each)) > 99 else f'{m:.3g}'} |\n" for name, each in figures.items()
    )


def render_speech(run: Path) -> str:
    """The table of a stored run of speech to text: medians, and words that were written wrong."""
    sides = json.loads(run.read_text(encoding="utf-8"))["sides"]
    lines = ["| | a sentence | 16 at once | words wrong |", "| --- | ---: | ---: | ---: |"]
    for name, each in sides.items():
        one, many = (median(each[key]) for key in ("1", "16"))
        lines.append(f"| {name} | {one:.2f} s | {many:.1f} s | {each['wrong'] / each['words']:.1%} |")
    return "\n".join(lines) + "\n"


_REFERENCE = "sentence-transformers"
TABLE = ROOT / "tests/architectures/table.json"
DATA = ROOT / "server/cli/architectures.json"
"""What `weft models --architectures` prints."""

PARTS: dict[str, Callable[[], str]] = {
    "formats": render_formats,
    "parameters": render_parameters,
    "decision-parameters": partial(render_parameters, DECISION_ROUTES, DECISION_REMARKS),
    "conversation-parameters": partial(render_parameters, CONVERSATION_ROUTES, CONVERSATION_REMARKS),
    "messages-parameters": partial(render_parameters, MESSAGES_ROUTES, MESSAGES_REMARKS),
    "llama-cpp-parameters": partial(render_parameters, LLAMA_CPP_ROUTES, LLAMA_CPP_REMARKS),
    "ollama-parameters": partial(render_parameters, OLLAMA_ROUTES, OLLAMA_REMARKS),
    "vector-parameters": partial(render_parameters, VECTOR_ROUTES, VECTOR_REMARKS),
    "speech-parameters": partial(render_parameters, SPEECH_ROUTES, SPEECH_REMARKS),
    "settings": render_settings,
    "reading-path": partial(render_reading_path, ROOT),
    "folders": partial(render_folders, ROOT),
    "architectures": partial(render_architectures, TABLE),
    "architectures.json": partial(render_steps, ROOT / "benchmarks/results/architectures.json"),
    "bench.json": partial(render_figures, ROOT / "benchmarks/results/bench.json"),
    "edits.json": partial(render_edits, ROOT / "benchmarks/results/edits.json"),
    "embeddings.json": partial(render_vectors, ROOT / "benchmarks/results/embeddings.json"),
    "pictures.json": partial(render_pictures, ROOT / "benchmarks/results/pictures.json"),
    "quantized.json": partial(render_files, ROOT / "benchmarks/results/quantized.json"),
    "real.json": partial(render_served, ROOT / "benchmarks/results/real.json"),
    "real-bf16.json": partial(render_served, ROOT / "benchmarks/results/real-bf16.json"),
    "quality.json": partial(render_quality, ROOT / "benchmarks/results/quality.json"),
    "real-quality.json": partial(render_real, ROOT / "benchmarks/results/real-quality.json"),
    "correctness": partial(render_correctness, ROOT / "benchmarks/results/real-quality.json"),
    "seq2seq.json": partial(render_seq2seq, ROOT / "benchmarks/results/seq2seq.json"),
    "speech.json": partial(render_speech, ROOT / "benchmarks/results/speech.json"),
    "start.json": partial(render_starts, ROOT / "benchmarks/results/start.json"),
    "one-stream.json": partial(render_figures, ROOT / "benchmarks/results/one-stream.json"),
}


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(update(path.read_text(encoding="utf-8"), PARTS), encoding="utf-8")
    DATA.write_text(render_data(TABLE), encoding="utf-8")
