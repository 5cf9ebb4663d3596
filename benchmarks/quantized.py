"""Decode steps and first tokens on one GGUF file, beside llama.cpp: `make bench BENCH=quantized`.

The files have the shape of Qwen3-0.6B and random blocks, of the types that llama.cpp's Q4_K_M and Q8_0 choose. Both
sides run in process, without HTTP, and in turns. Measure on a machine that does nothing else.
"""

import argparse
import dataclasses
import datetime
import json
import pathlib
import statistics
import sys
from dataclasses import dataclass

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.architectures.steps import Peer, Steps
from benchmarks.compare import machine
from tests.gguf_files import add_metadata, add_tokenizer, random_blocks
from weft.engine.describe.config import load_model_config
from weft.engine.gguf.folder import made_folder
from weft.engine.parts.decoder import decoder_spec

SCRATCH = pathlib.Path("build/bench")
NUM_STEPS = 15
VOCAB_SIZE = 151_936
CONFIG = {
    "max_position_embeddings": 8192,
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 1e6},
}
MATRICES = {
    "attn_q": (2048, 1024),
    "attn_k": (1024, 1024),
    "attn_v": (1024, 1024),
    "attn_output": (1024, 2048),
    "ffn_gate": (3072, 1024),
    "ffn_up": (3072, 1024),
    "ffn_down": (1024, 3072),
}


@dataclass(frozen=True, slots=True)
class Figure:
    """Medians, in milliseconds; ratios are Weft's time to llama.cpp's."""

    file: str
    what: str
    weft_ms: float
    llama_ms: float | None


def kind_of(file: str, layer: int, name: str) -> Kind:
    """The type that llama.cpp gives a matrix: in Q4_K_M, half of those of values and of ffn_down have 6 bits."""
    if file == "Q8_0":
        return Kind.Q8_0
    layers = CONFIG["num_hidden_layers"]
    assert isinstance(layers, int)
    has_more = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
    return Kind.Q6_K if name in ("attn_v", "ffn_down") and has_more else Kind.Q4_K


def write(name: str) -> pathlib.Path:
    """A file of random weights with a vocabulary of numbers; one that is there already is kept."""
    path = SCRATCH / f"random-{name}.gguf"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, "qwen3")
    add_metadata(writer, "qwen3", CONFIG, {})
    end = {"content": "<|im_end|>", "id": VOCAB_SIZE - 1, "special": True}
    vocab = {"t": 0, "1": 1} | {f"t{index}": index for index in range(2, VOCAB_SIZE - 1)}
    vocab["t1"] = vocab.pop("t2")
    add_tokenizer(writer, {"model": {"vocab": vocab, "merges": [["t", "1"]]}, "added_tokens": [end]})  # type: ignore[dict-item]
    writer.add_eos_token_id(VOCAB_SIZE - 1)

    def add(tensor: str, shape: tuple[int, int], kind: Kind) -> None:
        blocks = random_blocks(kind, shape)
        if kind == Kind.Q8_0:
            blocks.reshape(-1, 34)[:, :2] = np.frombuffer(np.float16(1e-4).tobytes(), np.uint8)
        writer.add_tensor(f"{tensor}.weight", blocks, raw_dtype=kind)

    add("token_embd", (VOCAB_SIZE, 1024), Kind.Q8_0 if name == "Q8_0" else Kind.Q6_K)
    for layer in range(28):
        for matrix, shape in MATRICES.items():
            add(f"blk.{layer}.{matrix}", shape, kind_of(name, layer, matrix))
        for norm, size in {"attn_norm": 1024, "ffn_norm": 1024, "attn_q_norm": 128, "attn_k_norm": 128}.items():
            writer.add_tensor(f"blk.{layer}.{norm}.weight", np.ones(size, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(1024, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file(progress=True)
    writer.close()
    return path


def measure(options: argparse.Namespace, name: str) -> list[Figure]:
    """All figures of one file."""
    path = write(name)
    folder = made_folder(path)
    numbers = [int(number) for number in options.streams.split(",")]
    steps = Steps(folder, VOCAB_SIZE, options.context, max(numbers), "auto")
    peer = Peer(options.llama_python, path, max(numbers) + 1, options.context) if options.llama_python else None
    figures = []

    def add(what: str, weft: list[float], llama: list[float]) -> None:
        medians = statistics.median(weft), statistics.median(llama) if llama else None
        figures.append(Figure(name, what, *medians))

    weft, llama = [], []
    for _ in track(range(options.runs + 1), f"{name}: first tokens"):
        weft.append(steps.first_token() * 1e3)
        llama += [peer.first_token()] if peer else []
    add(f"first token of {options.context}", weft[1:], llama[1:])  # the first ones find nothing in caches
    for number in numbers:
        steps.reach(number)
        weft, llama = [], []
        if peer:
            peer.time(number, 1)
        for _ in track(range(options.runs), f"{name}: steps of {number}"):
            weft.append(steps.time(NUM_STEPS) * 1e3)
            llama += [peer.time(number, NUM_STEPS)] if peer else []
        add(f"step of {number}", weft, llama)
    if peer:
        peer.close()
    return figures


def memory(name: str) -> float:
    """Bytes of weights in memory to those of 16 bits."""
    from weft.engine.kernels.cpu.layer_kernels import CpuKernels
    from weft.engine.kernels.cpu.library import load

    config, library = load_model_config(made_folder(write(name))), load()
    assert library is not None, "Weft has no kernels for this machine"
    spec = decoder_spec(config)
    kernels = CpuKernels(library, quantization=config.quantization)
    return spec.weights_bytes(kernels, config.dtype) / (2 * spec.num_parameters)


def table(figures: list[Figure]) -> Table:
    """For a terminal."""
    result = Table()
    for title in ("file", "", "Weft", "llama.cpp", "ratio"):
        result.add_column(title, justify="right" if title in ("Weft", "llama.cpp", "ratio") else "left")
    for figure in figures:
        peer = figure.llama_ms
        beside = (f"{peer:.1f} ms", f"{figure.weft_ms / peer:.2f}") if peer else ("", "")
        result.add_row(figure.file, figure.what, f"{figure.weft_ms:.1f} ms", *beside)
    return result


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser("python -m benchmarks.quantized", description=__doc__)
    parser.add_argument("--files", default="Q4_K_M,Q8_0", help="comma-separated (default: Q4_K_M,Q8_0)")
    parser.add_argument("--runs", type=int, default=3, help="rounds, of which medians are taken (default: 3)")
    parser.add_argument("--streams", default="1,16", help="numbers of streams, ascending (default: 1,16)")
    parser.add_argument("--context", type=int, default=512, help="tokens of a prompt (default: 512)")
    parser.add_argument("--llama-python", type=pathlib.Path, help="interpreter with llama-cpp-python and gguf")
    parser.add_argument("--out", type=pathlib.Path, default=SCRATCH, help=f"folder of the results (default: {SCRATCH})")
    options, console = parser.parse_args(), Console()
    here, figures, names = machine.describe(), list[Figure](), options.files.split(",")
    for name in names:
        figures += measure(options, name)
    console.print(table(figures))
    shares = {name: memory(name) for name in names}
    for name, share in shares.items():
        console.print(f"{name}: weights take {share:.3f} of 16 bits")
    done = {
        "date": datetime.date.today().isoformat(),
        "command": f"make bench BENCH=quantized ARGS='{' '.join(sys.argv[1:])}'",
        "machine": dataclasses.asdict(here),
        "figures": [dataclasses.asdict(figure) for figure in figures],
        "memory": shares,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "quantized.json").write_text(json.dumps(done, indent=1) + "\n")


if __name__ == "__main__":
    main()
