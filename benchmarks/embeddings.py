"""Vectors of many texts by Weft over HTTP, beside sentence-transformers: `make bench BENCH=embeddings`.

Writes a random checkpoint of BERT's shape, and texts of an equal number of tokens. `weft serve` answers POST
/v1/embeddings with all texts in one call, and in several calls at once. Sentence-transformers encodes the same folder
in the same dtype, in batches of the size that is fastest here. All take turns, so that what else the machine does
disturbs all alike. CPU time of all processes of a side is disturbed least. Both stand beside what the matrix products
alone take with torch.
"""

import argparse
import base64
import contextlib
import dataclasses
import datetime
import http.client
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from benchmarks.compare import machine, servers
from benchmarks.compare.workloads import Workload

SCRATCH = pathlib.Path("build/bench")
BERT_BASE: Mapping[str, int] = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "vocab_size": 30_522,
}
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
NUM_SPECIAL = 2  # around each text
START_S = 300.0
CLOCK_S = 0.01
"""What CPU time is counted in."""

Vectors = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Turn:
    """One measurement of one side: seconds, and seconds of CPU time of all its processes."""

    side: str
    wall_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Figures:
    """What one dtype gave."""

    dtype: str
    num_texts: int
    batch_size: int
    """Of sentence-transformers: the fastest."""
    products_s: float
    """Of all matrix products with torch, at the better of two of its ways."""
    largest_difference: float
    """Between a value of Weft's vectors and that of sentence-transformers."""
    turns: tuple[Turn, ...]

    def median(self, side: str, read: Callable[[Turn], float]) -> float:
        """The median over the rounds of a side."""
        return statistics.median(read(turn) for turn in self.turns if turn.side == side)


def words(number: int) -> list[str]:
    """That many different words of three to five letters."""
    letters = "etaoinshrdlu"
    made = [a + b + c for a in letters for b in letters for c in letters]
    made += [
        a + b for a in made for b in ("ra", "mi", "lo", "ke", "su", "ba", "ti", "no", "da", "ve", "gi", "pu", "xa")
    ]
    made += [a + "z" for a in made]
    return made[:number]


def write_checkpoint(folder: pathlib.Path, shape: Mapping[str, int]) -> None:
    """Write a random BERT, a tokenizer of whole words, and the files of sentence-transformers: mean, then length 1."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    vocabulary = [*SPECIAL_TOKENS, *words(shape["vocab_size"] - len(SPECIAL_TOKENS))]
    tokenizer = Tokenizer(models.WordPiece(vocab={word: i for i, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()  # type: ignore[assignment]  # its stubs forbid it
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    torch.manual_seed(0)
    bare = folder / "bare"
    BertModel(BertConfig(**shape), add_pooling_layer=False).save_pretrained(bare)  # type: ignore[arg-type]
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    ).save_pretrained(bare)
    modules = [Transformer(str(bare), max_seq_length=512), Pooling(shape["hidden_size"]), Normalize()]
    SentenceTransformer(modules=modules, device="cpu").save_pretrained(str(folder))


def checkpoint(parent: pathlib.Path, shape: Mapping[str, int]) -> pathlib.Path:
    """The folder of the checkpoint, which is written if it is not there."""
    folder = parent / f"bert-{shape['num_hidden_layers']}x{shape['hidden_size']}"
    if not (folder / "modules.json").exists():
        write_checkpoint(folder, shape)
    return folder


def make_texts(number: int, num_tokens: int, vocab_size: int) -> list[str]:
    """Texts of num_tokens tokens each, those around it included."""
    generator, known = random.Random(0), words(vocab_size - len(SPECIAL_TOKENS))
    return [" ".join(generator.choices(known, k=num_tokens - NUM_SPECIAL)) for _ in range(number)]


def cpu_s(root: int) -> float:
    """Seconds of CPU time that a process and those below it have taken."""
    parents, times = {}, {}
    for file in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            fields = file.read_text().rpartition(")")[2].split()
            parents[int(file.parent.name)] = int(fields[1])
            times[int(file.parent.name)] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    below = {root}
    while more := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= more
    return sum(times.get(pid, 0.0) for pid in below)


class Reference:
    """Sentence-transformers in a process of its own; see `serve_reference`."""

    name = "sentence-transformers"

    def __init__(self, folder: pathlib.Path, dtype: str) -> None:
        """Load the model."""
        command = [sys.executable, "-m", "benchmarks.embeddings", "--reference", str(folder), "--dtype", dtype]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._ask({})

    def encode(self, texts: Sequence[str], batch_size: int) -> Vectors:
        """The vectors of texts."""
        content = base64.b64decode(self._ask({"texts": texts, "batch_size": batch_size}))
        return np.frombuffer(content, np.float32).reshape(len(texts), -1)

    def products_s(self, shape: Mapping[str, int], num_tokens: int) -> float:
        """Seconds that the matrix products of so many tokens take."""
        return float(self._ask({"shape": dict(shape), "num_tokens": num_tokens}))

    def close(self) -> None:
        """End the process."""
        self.process.communicate(timeout=60)

    def _ask(self, question: dict[str, object]) -> str:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        if not (answer := self.process.stdout.readline()):
            raise SystemExit("sentence-transformers has ended")
        return answer


def serve_reference(folder: str, dtype_name: str) -> None:
    """Answer questions of standard input, a line each, until its end."""
    import torch
    from sentence_transformers import SentenceTransformer

    dtype: torch.dtype = getattr(torch, dtype_name)
    model = SentenceTransformer(folder, device="cpu", model_kwargs={"dtype": dtype})
    for line in sys.stdin:
        question, answer = json.loads(line), ""
        if "texts" in question:
            made = model.encode(question["texts"], batch_size=question["batch_size"], show_progress_bar=False)
            answer = base64.b64encode(np.asarray(made, np.float32).tobytes()).decode()
        elif "shape" in question:
            answer = str(time_products(question["shape"], question["num_tokens"], dtype))
        print(answer, flush=True)


def time_products(shape: Mapping[str, int], num_tokens: int, dtype: "torch.dtype") -> float:  # type: ignore[name-defined]  # noqa: F821
    """Seconds of the matrix products alone: plain, or with weights in oneDNN's layout, whichever is faster."""
    import torch

    size, inner, num_rows = shape["hidden_size"], shape["intermediate_size"], 4096
    total = 0.0
    for num_outputs, num_inputs in ((3 * size, size), (size, size), (inner, size), (size, inner)):
        inputs, weight = torch.randn(num_rows, num_inputs).to(dtype), torch.randn(num_outputs, num_inputs).to(dtype)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, num_rows)
        ways: tuple[Callable[[], object], ...] = (
            lambda i=inputs, w=weight: torch.nn.functional.linear(i, w),  # type: ignore[misc]
            lambda i=inputs, w=packed: torch.ops.mkldnn._linear_pointwise(i, w, None, "none", [], ""),  # type: ignore[misc]
        )
        with torch.inference_mode():
            total += min(min(timed(way) for _ in range(7)) for way in ways)
    return total * shape["num_hidden_layers"] * num_tokens / num_rows


def timed(function: Callable[[], object]) -> float:
    """Seconds of a call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def post(url: str, texts: Sequence[str]) -> Vectors:
    """The vectors of texts in one call, as the SDK of OpenAI asks for them."""
    target = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(target.hostname or "", target.port, timeout=3600)
    try:
        body = json.dumps({"model": "bert", "input": texts, "encoding_format": "base64"})
        connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        content = reply.read()
        if reply.status != 200:
            raise SystemExit(f"POST /v1/embeddings answered {reply.status}: {content[:300].decode(errors='replace')}")
    finally:
        connection.close()
    entries = json.loads(content)["data"]
    return np.stack([np.frombuffer(base64.b64decode(entry["embedding"]), np.float32) for entry in entries])


def post_at_once(url: str, texts: Sequence[str], num_calls: int) -> Vectors:
    """The same, shared among so many calls at once."""
    size = -(-len(texts) // num_calls)
    parts = [texts[start : start + size] for start in range(0, len(texts), size)]
    with ThreadPoolExecutor(len(parts)) as threads:
        return np.concatenate(list(threads.map(lambda part: post(url, part), parts)))


@contextlib.contextmanager
def both(folder: pathlib.Path, dtype: str, log: pathlib.Path) -> Iterator[tuple[servers.Running, Reference]]:
    """Weft and sentence-transformers, loaded."""
    options = ("--device", "cpu", "--dtype", dtype, "--served-model-name", "bert")
    weft = servers.weft({"bert": folder}, flags=options)
    group = [Workload("E", "embeddings", "bert", 1, 1, 1, 0)]
    with servers.running(weft, group, log, START_S) as server:
        reference = Reference(folder, dtype)
        try:
            yield server, reference
        finally:
            reference.close()


def measure(options: argparse.Namespace, dtype: str, shape: Mapping[str, int], console: Console) -> Figures:
    """All turns of one dtype."""
    SCRATCH.mkdir(parents=True, exist_ok=True)
    texts = make_texts(options.texts, options.tokens, shape["vocab_size"])
    with both(checkpoint(SCRATCH, shape), dtype, SCRATCH / f"embeddings-{dtype}.log") as (server, reference):
        few = texts[: max(len(texts) // 8, 64)]
        vectors = reference.encode(few, 32)
        difference = float(np.abs(post(server.url, few) - vectors).max())
        sizes = {size: timed(lambda size=size: reference.encode(few, size)) for size in (32, 64)}  # type: ignore[misc]
        batch_size = min(sizes, key=lambda size: sizes[size])
        sides: dict[str, tuple[int, Callable[[], Vectors]]] = {
            "Weft, one call": (server.pid or 0, lambda: post(server.url, texts)),
            f"Weft, {options.calls} calls": (server.pid or 0, lambda: post_at_once(server.url, texts, options.calls)),
            Reference.name: (reference.process.pid, lambda: reference.encode(texts, batch_size)),
        }
        if options.url:
            sides[f"server at {options.url}"] = options.pid or 0, lambda: post(options.url, texts)
        turns = []
        for number in range(options.runs):
            for side, (pid, run) in sides.items():
                before = cpu_s(pid)
                wall_s = timed(run)
                turns.append(Turn(side, wall_s, max(cpu_s(pid) - before, CLOCK_S)))
                console.print(
                    f"{dtype}, round {number + 1}: {side}: {wall_s:.1f} s, {turns[-1].cpu_s:.1f} s of CPU time"
                )
        products_s = reference.products_s(shape, len(texts) * options.tokens)
    return Figures(dtype, len(texts), batch_size, products_s, difference, tuple(turns))


def table(figures: Sequence[Figures]) -> Table:
    """For a terminal."""
    result = Table()
    for title in ("dtype", "", "texts/s", "beside s.-t.", "CPU ms a text", "beside s.-t."):
        result.add_column(title, justify="left" if title in ("dtype", "") else "right")
    for one in figures:
        slowest = one.median(Reference.name, lambda turn: turn.wall_s)
        most = one.median(Reference.name, lambda turn: turn.cpu_s)
        for side in dict.fromkeys(turn.side for turn in one.turns):
            wall, cpu = one.median(side, lambda turn: turn.wall_s), one.median(side, lambda turn: turn.cpu_s)
            ratios = f"{slowest / wall:.2f}", f"{cpu / one.num_texts * 1e3:.0f}", f"{most / cpu:.2f}"
            result.add_row(one.dtype, side, f"{one.num_texts / wall:.2f}", *ratios)
        result.add_row(one.dtype, "matrix products alone", f"{one.num_texts / one.products_s:.2f}")
        result.add_row(one.dtype, f"batches of {one.batch_size}; largest difference {one.largest_difference:.1e}")
    return result


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser("python -m benchmarks.embeddings", description=__doc__)
    parser.add_argument("--texts", type=int, default=1000, help="default: 1000")
    parser.add_argument("--tokens", type=int, default=128, help="of a text (default: 128)")
    parser.add_argument("--calls", type=int, default=8, help="at once (default: 8)")
    parser.add_argument("--runs", type=int, default=3, help="rounds, of which medians are taken (default: 3)")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="comma-separated (default: float32,bfloat16)")
    parser.add_argument("--out", type=pathlib.Path, default=SCRATCH, help=f"folder of the results (default: {SCRATCH})")
    parser.add_argument("--url", help="of a server that runs already, with the same model as bert, at /v1/embeddings")
    parser.add_argument("--pid", type=int, help="its first process, for its CPU time")
    parser.add_argument("--reference", help=argparse.SUPPRESS)
    parser.add_argument("--dtype", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(shape: Mapping[str, int] = BERT_BASE) -> None:
    """Run the command."""
    options, console = parse(sys.argv[1:]), Console()
    if options.reference:
        serve_reference(options.reference, options.dtype)
        return
    here = machine.describe()
    figures = [measure(options, dtype, shape, console) for dtype in options.dtypes.split(",")]
    console.print(table(figures))
    done = {
        "date": datetime.date.today().isoformat(),
        "command": f"make bench BENCH=embeddings ARGS='{' '.join(sys.argv[1:])}'",
        "machine": dataclasses.asdict(here),
        "figures": [dataclasses.asdict(one) for one in figures],
    }
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "embeddings.json"
    file.write_text(json.dumps(done, indent=1) + "\n")
    console.print(f"written: {file}")


if __name__ == "__main__":
    main()
