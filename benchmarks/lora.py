"""What adapters cost a decode step on the CPU: `make bench BENCH=lora`.

An engine with random weights of a model's shape, and 16 streams that decode. The same steps are computed without
adapters, and with adapters of rank 16 for all linear layers, each for some of the streams. A second engine has no slots
for adapters at all. All take turns, a few steps each, so that what else the machine does disturbs all alike.
"""

import argparse
import dataclasses
import datetime
import json
import pathlib
import random
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from benchmarks.compare import machine
from benchmarks.compare.checkpoints import COMMON, SHAPES
from weft.engine.start.startup import start
from weft.engine.wire.inputs import TokensInput
from weft.engine.wire.messages import AddRequest, EngineOptions
from weft.engine.wire.params import SamplingParams

SCRATCH = pathlib.Path("build/bench")
WITHOUT_SLOTS, WITHOUT = "without slots for adapters", "without adapters"
_STEPS_A_TURN, _CONTEXT = 4, 64


@dataclass(frozen=True, slots=True)
class Figures:
    """What one shape gave, by side: of each turn the mean seconds of a step, and those of CPU time."""

    shape: str
    num_streams: int
    rank: int
    turns: dict[str, list[tuple[float, float]]]


def write_model(folder: pathlib.Path, shape: Mapping[str, int]) -> pathlib.Path:
    """Write config.json alone, since weights are random."""
    folder.mkdir(parents=True, exist_ok=True)
    kind = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "dtype": "bfloat16", "hidden_act": "silu"}
    (folder / "config.json").write_text(json.dumps({**kind, "rms_norm_eps": 1e-6, **COMMON, **shape}))
    return folder


def write_adapter(folder: pathlib.Path, shape: Mapping[str, int], rank: int, seed: int) -> pathlib.Path:
    """Write an adapter with random values for all linear layers of the blocks."""
    folder.mkdir(parents=True, exist_ok=True)
    hidden, inner, dim = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    queries, keys = shape["num_attention_heads"] * dim, shape["num_key_value_heads"] * dim
    sizes = {
        "self_attn": {"q_proj": (hidden, queries), "k_proj": (hidden, keys), "v_proj": (hidden, keys)},
        "mlp": {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)},
    }
    sizes["self_attn"]["o_proj"] = queries, hidden
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(shape["num_hidden_layers"]):
        for part, modules in sizes.items():
            for module, (num_inputs, num_outputs) in modules.items():
                name = f"base_model.model.model.layers.{layer}.{part}.{module}"
                for kind, size in (("A", (rank, num_inputs)), ("B", (num_outputs, rank))):
                    values = torch.randn(size, generator=generator) * 0.02
                    tensors[f"{name}.lora_{kind}.weight"] = values.bfloat16()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


class Streams:
    """An engine whose streams decode."""

    def __init__(self, model: pathlib.Path, num_streams: int, num_tokens: int, max_loras: int, rank: int) -> None:
        """Start it and compute the prompts."""
        options = EngineOptions(
            model=str(model),
            device="cpu",
            load_format="dummy",
            max_model_len=num_tokens,
            max_num_seqs=num_streams,
            prefix_caching=False,
            max_loras=max_loras,
            max_lora_rank=rank,
        )
        self.engine: Any = start(options, "benchmark").engine
        chance = random.Random(0)
        for number in range(num_streams):
            prompt = chance.choices(range(2, 1000), k=_CONTEXT)
            params = SamplingParams(temperature=0.0, max_tokens=num_tokens - _CONTEXT, ignore_eos=True)
            self.engine.add(0, AddRequest(TokensInput(prompt), params, request_id=number))
        self.time(num_streams + 8)

    def use(self, num_adapters: int) -> None:
        """From now on the streams use so many adapters in turn."""
        for index, request in enumerate(self.engine.scheduler.running):
            request.adapter_slot = index % num_adapters + 1 if num_adapters else 0

    def time(self, num_steps: int) -> tuple[float, float]:
        """Seconds of a step, and of CPU time, which other programs disturb least; means of so many steps."""
        begin, cpu_begin = time.perf_counter(), time.process_time()
        for _ in range(num_steps):
            self.engine.step()
        return (time.perf_counter() - begin) / num_steps, (time.process_time() - cpu_begin) / num_steps


def measure(options: argparse.Namespace, console: Console) -> Figures:
    """All turns."""
    shape, counts = SHAPES[options.shape], [int(count) for count in options.adapters.split(",")]
    model = write_model(SCRATCH / f"lora-{options.shape}", shape)
    num_tokens = _CONTEXT + 64 + options.streams + (options.runs + 1) * (len(counts) + 1) * (_STEPS_A_TURN + 1)
    sizes = options.streams, num_tokens
    bare, slots = Streams(model, *sizes, 0, options.rank), Streams(model, *sizes, max(counts), options.rank)
    for slot in range(1, max(counts) + 1):
        folder = write_adapter(SCRATCH / f"lora-{options.shape}-{options.rank}-{slot}", shape, options.rank, slot)
        slots.engine._executor.load_adapter(slot, folder).result()
    sides = {WITHOUT_SLOTS: (bare, 0), WITHOUT: (slots, 0)}
    sides |= {f"{count} adapters": (slots, count) for count in counts}
    turns: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
    for number in range(options.runs):
        for side, (streams, count) in sides.items():
            streams.use(count)
            streams.time(1)
            turns[side].append(streams.time(_STEPS_A_TURN))
        bare.time(len(counts) * (_STEPS_A_TURN + 1))  # contexts as long as those of the other engine
        if number % 10 == 9:
            console.print(f"{number + 1} of {options.runs} rounds")
    return Figures(options.shape, options.streams, options.rank, turns)


def table(figures: Figures) -> Table:
    """For a terminal: of each side the median, and what it is beside the one without adapters, round by round."""
    result = Table()
    for title in ("", "ms a step", "beside no adapters", "CPU ms a step", "beside no adapters"):
        result.add_column(title, justify="right" if title else "left")
    plain = list(zip(*figures.turns[WITHOUT], strict=True))
    for side, turns in figures.turns.items():
        row = []
        for values, others in zip(zip(*turns, strict=True), plain, strict=True):
            ratio = statistics.median(a / b for a, b in zip(values, others, strict=True))
            row += [f"{statistics.median(values) * 1e3:.1f}", f"{ratio:.3f}"]
        result.add_row(side, *row)
    return result


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser("python -m benchmarks.lora", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="main", help="of the model (default: main, Qwen3-0.6B)")
    parser.add_argument("--streams", type=int, default=16, help="default: 16")
    parser.add_argument("--adapters", default="8,16,1", help="how many share the streams (default: 8,16,1)")
    parser.add_argument("--rank", type=int, default=16, help="default: 16")
    parser.add_argument("--runs", type=int, default=40, help="rounds (default: 40)")
    parser.add_argument("--out", type=pathlib.Path, default=SCRATCH, help=f"folder of the results (default: {SCRATCH})")
    return parser.parse_args(arguments)


def main() -> None:
    """Run the command."""
    options, console = parse(sys.argv[1:]), Console()
    here = machine.describe()
    figures = measure(options, console)
    result = {
        "date": datetime.date.today().isoformat(),
        "command": f"make bench BENCH=lora ARGS='{' '.join(sys.argv[1:])}'",
        "machine": dataclasses.asdict(here),
        **dataclasses.asdict(figures),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "lora.json").write_text(json.dumps(result, indent=1) + "\n")
    console.print(table(figures))


if __name__ == "__main__":
    main()
