"""What every form of weights does to a trained model: `make bench BENCH=quality`.

The demo model, the one trained model at hand, is written in each form by the writers of the tests, rounded to nearest:
nothing is calibrated, so files that people publish are better than this. It then reads chats phrased in ways that its
training never used, with Weft's own kernels, and is compared with itself in bfloat16. See `tests/engine/quality.py`.
"""

import argparse
import dataclasses
import datetime
import json
import pathlib
import sys
import tempfile
from collections.abc import Callable, Iterator

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.compare import machine
from tests.engine.kernels.test_cache_quality import Fp8Cache, Int8Cache
from tests.engine.quality import FOLDER, growth_of_perplexity, held_out_chats, log_probabilities
from tests.engine.weights.test_quantized import LIBRARIES, OWN
from weft.engine.describe.config import load_model_config
from weft.engine.kernels.cpu.layer_kernels import CpuKernels
from weft.engine.kernels.cpu.library import NativeLibrary, load
from weft.engine.kernels.torch.layer_kernels import TorchKernels
from weft.engine.parts.decoder import decoder_spec

SCRATCH = pathlib.Path("build/bench")
NAMES = {
    "fp8 outputs": "fp8, a scale for each output",
    "fp8 blocks": "fp8, blocks of 32 x 64",
    "pack 8 bits": "W8A16, a scale for each output",
    "int8": "bitsandbytes int8",
    "mxfp8": "MXFP8",
    "gptq": "GPTQ's layout, 4 bits, groups of 32",
    "gptq zeros": "the same with zero points, as AWQ's",
    "nvfp4": "NVFP4",
    "mxfp4": "MXFP4",
    "nf4": "bitsandbytes NF4",
    "fp4": "bitsandbytes FP4",
}
"""Of the writers' forms, those that differ in what they do to weights."""


def forms(library: NativeLibrary, scratch: pathlib.Path) -> Iterator[tuple[str, Callable[[], torch.Tensor], float]]:
    """Of each form its name, what computes the log-probabilities of `chats`, and bits of a weight in memory."""
    chats, _ = held_out_chats()
    for storage in ("int8", "int4"):
        kernels = CpuKernels(library, storage)
        yield (
            f"--quantization {storage}",
            lambda kernels=kernels: log_probabilities(kernels, chats),
            bits(kernels, FOLDER),
        )
    for name, title in NAMES.items():
        folder = scratch / name.replace(" ", "-")
        folder.mkdir()
        (OWN | LIBRARIES)[name](FOLDER, folder)
        kernels = CpuKernels(library, quantization=load_model_config(folder).quantization)
        yield (
            title,
            lambda kernels=kernels, folder=folder: log_probabilities(kernels, chats, folder=folder),
            bits(kernels, folder),
        )
    yield "--kv-cache-dtype fp8", lambda: log_probabilities(TorchKernels(), chats, Fp8Cache), 16.0
    yield "--kv-cache-dtype int8", lambda: log_probabilities(TorchKernels(), chats, Int8Cache), 16.0


def bits(kernels: CpuKernels, folder: pathlib.Path) -> float:
    """Bits of memory for each weight, those of tables and norms included."""
    spec = decoder_spec(load_model_config(folder))
    return spec.weights_bytes(kernels, torch.bfloat16) * 8 / spec.num_parameters


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser("python -m benchmarks.quality", description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=SCRATCH, help=f"folder of the results (default: {SCRATCH})")
    options, console = parser.parse_args(), Console()
    library = load()
    if library is None:
        raise SystemExit("Weft has no kernels for this machine")
    chats, is_answer_next = held_out_chats()
    plain, rows = log_probabilities(CpuKernels(library), chats), []
    with tempfile.TemporaryDirectory() as scratch:
        found = forms(library, pathlib.Path(scratch))
        for name, compute, num_bits in track(found, "forms", total=len(NAMES) + 4, console=console):
            changed = compute()
            of_answers, _ = growth_of_perplexity(plain, changed, chats, is_answer_next)
            divergence = (plain.exp() * (plain - changed)).sum(-1).mean().item()
            same = (plain.argmax(-1) == changed.argmax(-1)).double().mean().item()
            rows.append({"form": name, "bits": num_bits, "kl": divergence, "answers": of_answers, "same_choice": same})
    table = Table()
    for title in ("", "bits a weight", "KL divergence", "perplexity of answers", "same greedy choice"):
        table.add_column(title, justify="right" if title else "left")
    for row in rows:
        figures = f"{row['bits']:.2f}", f"{row['kl']:.5f}", f"{row['answers']:+.3%}", f"{row['same_choice']:.2%}"
        table.add_row(str(row["form"]), *figures)
    console.print(table)
    done = {
        "date": datetime.date.today().isoformat(),
        "command": f"make bench BENCH=quality ARGS='{' '.join(sys.argv[1:])}'",
        "machine": dataclasses.asdict(machine.describe()),
        "figures": rows,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "quality.json").write_text(json.dumps(done, indent=1) + "\n")


if __name__ == "__main__":
    main()
