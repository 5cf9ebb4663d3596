"""`weft plan`: what a model takes; of several, what each gets and which are loaded at the same time."""

import itertools
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec

from weft.engine.shared.memory import ModelMemory, format_size
from weft.server.run.child import python_command
from weft.server.run.memory_shares import Shares, read_memories, shares, with_shares
from weft.server.settings import Settings, engine_options
from weft.server.terminal.table import align

_HEAD = ("model", "load", "device", "weights", "activations", "KV cache", "in all", "requests at once")
_MOST_COMBINED = 12
"""Combinations of more models loaded on demand are not listed: there are thousands."""


def show_plan(settings: Settings) -> int:
    """Print the plan, and return the exit code.

    Args:
        settings: With `served_model_name` filled in, unless there are `models`, and checkpoint folders as models.

    Raises:
        StartError: Several models do not fit together.
    """
    if len(settings.fleet) == 1:
        ((name, entry),) = settings.fleet.items()
        options = msgspec.json.encode(engine_options(settings.for_model(name), Path(entry.model or "")))
        return subprocess.run(python_command("weft.engine.start.print_plan"), input=options).returncode
    found = shares(settings)
    for name, fault in found.faults.items():
        print(f"weft: note: models: {name} cannot be loaded: {fault}", file=sys.stderr)
    always = [name for name, entry in settings.fleet.items() if entry.load == "always"]
    print(describe_plan(found, always, read_memories(with_shares(settings, found), found.models)))
    return 0


def describe_plan(shares: Shares, always: Collection[str], served: Mapping[str, ModelMemory]) -> str:
    """A table of all models, then what is free on each device and who fits there together.

    Args:
        shares: As `memory_shares.divide` returns them.
        always: Names of the models that are always loaded.
        served: By name, the memory of each model with the KV cache that it gets.
    """
    rows: list[tuple[str, ...]] = [_HEAD]
    for name, share in shares.models.items():
        memory, then = share.memory, served[name]
        sizes = (memory.weights_bytes, memory.activations_bytes, share.cache_bytes, share.total_bytes)
        load = "always" if name in always else "on-demand"
        at_once = then.fault or f"{then.num_requests:,} of {then.max_model_len:,} tokens"
        rows.append((name, load, memory.device, *map(format_size, sizes), at_once))
    lines = [align(rows)]
    for device, budget_bytes in shares.budget_bytes.items():
        sizes_there = {name: s.total_bytes for name, s in shares.models.items() if s.memory.device == device}
        free = format_size(min(shares.models[name].memory.free_bytes for name in sizes_there))
        together = "; or ".join(", ".join(names) for names in _together(sizes_there, always, budget_bytes))
        lines += [
            f"\nfree memory  {free} ({device}), of which models take up to {format_size(budget_bytes)}",
            f"together     {together}",
        ]
    return "\n".join(lines)


def _together(sizes: Mapping[str, int], always: Collection[str], budget_bytes: int) -> list[list[str]]:
    """The largest sets of models that may be loaded at the same time."""
    others = [name for name in sizes if name not in always]
    if len(others) > _MOST_COMBINED:
        return [[name for name in sizes if name in always] + ["and as many of the others as fit"]]
    found: list[set[str]] = []
    for number in range(len(others), -1, -1):
        for chosen in itertools.combinations(others, number):
            names = {name for name in sizes if name in always or name in chosen}
            if sum(sizes[name] for name in names) <= budget_bytes and not any(names <= larger for larger in found):
                found.append(names)
    return [[name for name in sizes if name in names] for names in found]
