"""What `weft models` and `weft plan` print: a server's models, known architectures, and the memory that models take."""

import itertools
import pathlib
import subprocess
import sys
import textwrap
import time
from collections.abc import Collection, Mapping

import msgspec

from weft.engine.wire.machine import ModelMemory, format_size
from weft.server.cli.chat_client import ChatClient, ChatError
from weft.server.cli.tables import align
from weft.server.settings import Settings, engine_options
from weft.server.supervise.memory_shares import Shares, read_memories, shares, with_shares
from weft.server.supervise.spawn import python_command
from weft.server.text.shield import strip_controls

EXIT_FAILED = 1
_UNITS = (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0))


def list_models(url: str, api_key: str | None) -> int:
    """`weft models`: print name, state, memory and last use of each model of a server. Returns the exit code.

    Another server than Weft tells only the names.
    """
    try:
        cards = ChatClient(url, api_key).cards()
    except ChatError as error:
        advice = "`weft models --architectures` needs no server and lists what can be served"
        print(f"weft: error: {error}; {advice}", file=sys.stderr)
        return EXIT_FAILED
    now = time.time()
    print(align([("model", "state", "memory", "last use", "adapter of"), *(_describe(card, now) for card in cards)]))
    return 0


def _describe(card: dict[str, object], now: float) -> tuple[str, ...]:
    """The cells of a row, from an entry of GET /v1/models; what it does not tell is a dash."""
    state, num_bytes, last_used = card.get("state"), card.get("memory_bytes"), card.get("last_used", "")
    used = "never" if last_used is None else "-"
    return (
        strip_controls(str(card.get("id"))),
        strip_controls(str(state or "-")),
        format_size(num_bytes) if isinstance(num_bytes, int) else "-",
        _ago(now - last_used) if isinstance(last_used, int | float) else used,
        strip_controls(str(card.get("parent") or "-")),
    )


def _ago(seconds: float) -> str:
    """A duration in its largest unit, such as 3 min ago."""
    unit, length = next((each for each in _UNITS if seconds >= each[1]), _UNITS[-1])
    return f"{max(seconds, 0) // length:.0f} {unit} ago"


_WIDTH = 100


class _Architectures(msgspec.Struct):
    """A sentence of totals, and causal model types of transformers by what tests found; made by `docs.generate`."""

    total: str
    groups: dict[str, list[str]]


def describe_architectures() -> str:
    """`weft models --architectures`: the totals, then a paragraph for each outcome and reason.

    Its model types are indented.
    """
    data = pathlib.Path(__file__).with_name("architectures.json").read_bytes()
    found = msgspec.json.decode(data, type=_Architectures)
    lines = textwrap.wrap(found.total, _WIDTH)
    for title, names in found.groups.items():
        indented = textwrap.wrap(", ".join(names), _WIDTH, initial_indent="  ", subsequent_indent="  ")
        lines += ["", f"{title} ({len(names)})", *indented]
    return "\n".join(lines)


_HEAD = ("model", "load", "device", "weights", "activations", "KV cache", "in all", "requests at once")
_MOST_COMBINED = 12
"""Combinations of more models loaded on demand are not listed: there are thousands."""


def show_plan(settings: Settings) -> int:
    """`weft plan`: print what a model takes; of several, also which fit together. Returns the exit code.

    Args:
        settings: With `served_model_name` filled in, unless there are `models`, and checkpoint folders as models.

    Raises:
        StartError: Several models do not fit together.
    """
    if len(settings.fleet) == 1:
        ((name, entry),) = settings.fleet.items()
        options = msgspec.json.encode(engine_options(settings.for_model(name), pathlib.Path(entry.model or "")))
        return subprocess.run(python_command("weft.engine.start.report", "plan"), input=options).returncode
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
    experts = {name: share.memory.host_bytes for name, share in shares.models.items() if share.memory.host_bytes}
    if experts:
        told = ", ".join(f"{name} {format_size(num_bytes)}" for name, num_bytes in experts.items())
        lines.append(f"\nhost memory  for experts that do not fit the device: {told}")
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
