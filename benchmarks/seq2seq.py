"""Models with an encoder beside transformers' `generate`, in one process. `make bench BENCH=seq2seq`.

    python -m benchmarks.seq2seq --out benchmarks/results/seq2seq.json

Random weights of the shapes of FLAN-T5-small and BART-base, in bfloat16 for both; greedy, inputs of 256 tokens, answers
of 64. The engine has no server before it. Both in turns, after a first round that is not counted.
"""

import argparse
import dataclasses
import json
import pathlib
import random
import statistics
import tempfile
import time
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import BartConfig, BartForConditionalGeneration, T5Config, T5ForConditionalGeneration

from benchmarks.compare import machine
from weft.engine.start.startup import start
from weft.engine.wire.inputs import EncoderInput
from weft.engine.wire.messages import AddRequest, EngineOptions
from weft.engine.wire.params import SamplingParams

INPUT_TOKENS, OUTPUT_TOKENS, NUM_INPUTS = 256, 64, (1, 16)
T5 = {"vocab_size": 32128, "d_model": 512, "d_ff": 1024, "num_layers": 8, "num_heads": 6, "decoder_start_token_id": 0}
BART = {"d_model": 768, "encoder_layers": 6, "decoder_layers": 6, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072}
HEADS = {"encoder_attention_heads": 12, "decoder_attention_heads": 12, "forced_eos_token_id": None}


def write_models(folder: pathlib.Path) -> dict[str, Any]:
    """Write both checkpoints; returns transformers' modules by name."""
    torch.manual_seed(0)
    models = {
        "FLAN-T5-small": T5ForConditionalGeneration(T5Config(feed_forward_proj="gated-gelu", **T5)),
        "BART-base": BartForConditionalGeneration(BartConfig(decoder_start_token_id=2, **BART, **HEADS)),
    }
    for name, model in models.items():
        model.eval().bfloat16().save_pretrained(folder / name)
        model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
    return models


def inputs_of(count: int, vocab_size: int, seed: int) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(10, vocab_size) for _ in range(INPUT_TOKENS)] for _ in range(count)]


def by_engine(engine: Any, inputs: list[list[int]], first: int) -> float:
    """Seconds for all answers."""
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    began, num_tokens = time.perf_counter(), 0
    for ids in inputs:
        engine.add(0, AddRequest(EncoderInput(ids, [first]), params))
    while engine.has_work:
        num_tokens += sum(len(output.token_ids) for _, output in engine.step())
    assert num_tokens == len(inputs) * OUTPUT_TOKENS, num_tokens
    return time.perf_counter() - began


def by_transformers(model: Any, inputs: list[list[int]]) -> float:
    """Seconds for all answers, as one batch."""
    began = time.perf_counter()
    with torch.no_grad():
        found = model.generate(torch.tensor(inputs), max_new_tokens=OUTPUT_TOKENS, min_new_tokens=OUTPUT_TOKENS)
    assert found.shape[1] == OUTPUT_TOKENS + 1
    return time.perf_counter() - began


def measure(folder: pathlib.Path, model: Any, runs: int) -> dict[str, dict[str, list[float]]]:
    """By the number of inputs at once, the seconds of each."""
    config = model.config
    options = EngineOptions(model=str(folder), device="cpu", dtype="bfloat16", kv_cache_memory=1 << 30)
    engine, threads = start(options, "bench").engine, torch.get_num_threads()
    found: dict[str, dict[str, list[float]]] = {}
    for count in NUM_INPUTS:
        weft_s, others_s = list[float](), list[float]()
        for number in track(range(runs + 1), f"{folder.name}, {count} at once"):
            inputs = inputs_of(count, config.vocab_size, number)
            torch.set_num_threads(threads)
            weft_s.append(by_engine(engine, inputs, config.decoder_start_token_id))
            torch.set_num_threads(machine.describe().num_cores)
            others_s.append(by_transformers(model, inputs))
        found[str(count)] = {"weft": weft_s[1:], "transformers": others_s[1:]}
    return found


def table(found: dict[str, dict[str, dict[str, list[float]]]]) -> Table:
    """Medians, and how many times as long transformers takes."""
    shown = Table("", "at once", "Weft", "transformers", "ratio")
    for name, by_count in found.items():
        for count, each in by_count.items():
            ours, others = (statistics.median(each[key]) for key in ("weft", "transformers"))
            shown.add_row(name, count, f"{ours:.2f} s", f"{others:.2f} s", f"{others / ours:.2f}")
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.seq2seq", description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=pathlib.Path, help="a file for the figures; the tree must be of a commit")
    options, facts = parser.parse_args(), machine.describe()
    machine.refuse_changes(parser, options.out)
    with tempfile.TemporaryDirectory() as folder:
        models = write_models(pathlib.Path(folder))
        found = {name: measure(pathlib.Path(folder, name), model, options.runs) for name, model in models.items()}
    Console().print(table(found))
    if options.out:
        report = {"machine": dataclasses.asdict(facts), "runs": options.runs, "seconds": found}
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
