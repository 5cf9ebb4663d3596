"""Divides the memory of each device among several models, and tells who must leave so that another has room.

All models that are always loaded fit together, and beside them the largest of those that are loaded on demand. What
these leave is divided among their KV caches: each gets as much as every other, but at least what serves one request
and at most what it would take alone. So nothing is promised twice.

All this is decided before one of them is loaded. Imports no torch: the engine's package is asked for sizes, in one
process for all models.
"""

import subprocess
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from weft.engine.wire.machine import SHARE_OF_FREE_MEMORY, ModelMemory, cache_bytes, format_size
from weft.server.settings import Settings, StartError, engine_options
from weft.server.supervise.spawn import python_command


@dataclass(frozen=True, slots=True)
class ModelShare:
    """What a model gets of its device while it is loaded.

    Attributes:
        memory: Its sizes, as planned.
        cache_bytes: For its KV cache.
    """

    memory: ModelMemory
    cache_bytes: int

    @property
    def kv_cache_memory(self) -> int:
        """Bytes for the KV cache of each of its ranks: the setting of that name."""
        return self.cache_bytes // self.memory.num_sharing

    @property
    def total_bytes(self) -> int:
        """What it takes in all."""
        return _loaded_bytes(self.memory) + self.cache_bytes


@dataclass(frozen=True, slots=True)
class Shares:
    """What all models get.

    Attributes:
        models: By name; empty if there is but one, which takes what it finds.
        budget_bytes: For each device, what the models loaded on it may take together.
        faults: Models loaded on demand that cannot be planned, and why.
    """

    models: Mapping[str, ModelShare]
    budget_bytes: Mapping[str, int]
    faults: Mapping[str, str]


def shares(settings: Settings) -> Shares:
    """Plan and divide the memory of `settings.models`, whose checkpoints are folders.

    Raises:
        StartError: They do not fit, as `divide` says, or the process that reads them failed.
    """
    if len(settings.fleet) < 2:
        return Shares({}, {}, {})
    memories = read_memories(settings, settings.fleet)
    return divide(memories, [name for name, entry in settings.fleet.items() if entry.load == "always"])


def with_shares(settings: Settings, shares: Shares) -> Settings:
    """The settings in which every model has the KV cache of its share."""
    entries = dict(settings.models)
    for name, share in shares.models.items():
        entries[name] = entries[name].model_copy(update={"kv_cache_memory": share.kv_cache_memory})
    return settings.model_copy(update={"models": entries})


def read_memories(settings: Settings, names: Iterable[str]) -> dict[str, ModelMemory]:
    """What each of these models would take, from its configuration alone.

    Raises:
        StartError: The process that reads them failed.
    """
    folders = {name: Path(settings.fleet[name].model or "") for name in names}
    options = [engine_options(settings.for_model(name), folder) for name, folder in folders.items()]
    command = python_command("weft.engine.start.report", "memory")
    done = subprocess.run(command, input=msgspec.json.encode(options), capture_output=True)
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"exit code {done.returncode}"]
        raise StartError(f"models: their memory cannot be planned: {said[-1]}")
    return dict(zip(folders, msgspec.json.decode(done.stdout, type=list[ModelMemory]), strict=True))


def divide(memories: Mapping[str, ModelMemory], always: Collection[str]) -> Shares:
    """Divide what is free on each device.

    Args:
        memories: By the name of the model.
        always: The names of those that are loaded together at the start.

    Raises:
        StartError: One of these cannot be planned, or they do not fit together, or one of the others beside them.
    """
    faults = {name: memory.fault for name, memory in memories.items() if memory.fault}
    for name in always:
        if name in faults:
            raise StartError(f"models: {name}: {faults[name]}")
    models: dict[str, ModelShare] = {}
    budgets: dict[str, int] = {}
    for device in dict.fromkeys(memory.device for memory in memories.values() if not memory.fault):
        there = {name: m for name, m in memories.items() if m.device == device and not m.fault}
        caches, budgets[device] = _divide_device(device, there, [name for name in there if name in always])
        for name, kv_bytes in caches.items():
            models[name] = ModelShare(there[name], kv_bytes)
    return Shares({name: models[name] for name in memories if name in models}, budgets, faults)


def _divide_device(
    device: str, there: Mapping[str, ModelMemory], always: Sequence[str]
) -> tuple[Mapping[str, int], int]:
    """Bytes of the KV cache of each model on one device, and what the loaded ones may take together."""
    free_bytes = min(memory.free_bytes for memory in there.values())
    others = [name for name in there if name not in always]
    for names in [*([name] for name in there), always, *([*always, name] for name in others)]:
        _check_fit({name: there[name] for name in names}, free_bytes)
    largest = max(others, key=lambda name: _loaded_bytes(there[name]) + _least_bytes(there[name]), default=None)
    together = [there[name] for name in (*always, *filter(None, [largest]))]
    left_bytes = free_bytes - sum(_loaded_bytes(m) + (m.kv_bytes if m.is_kv_fixed else 0) for m in together)
    divided = [memory for memory in together if not memory.is_kv_fixed]
    pool_bytes = max(cache_bytes(left_bytes, device), sum(_least_bytes(memory) for memory in divided))

    def sum_of_caches(level_bytes: int) -> int:
        return sum(_cache(memory, level_bytes) for memory in divided)

    level_bytes = bisect_right(range(pool_bytes + 1), pool_bytes, key=sum_of_caches) - 1
    caches = {name: _cache(memory, level_bytes) for name, memory in there.items()}
    if largest:  # no other one may take more than it, or it would not fit
        slot_bytes = _loaded_bytes(there[largest]) + caches[largest]
        caches |= {name: min(caches[name], slot_bytes - _loaded_bytes(there[name])) for name in others}
    return caches, free_bytes - int(left_bytes * (1 - SHARE_OF_FREE_MEMORY[device]))


def _check_fit(models: Mapping[str, ModelMemory], free_bytes: int) -> None:
    """Raise StartError if models do not fit together, with the least of caches."""
    needed_bytes = float(sum(_loaded_bytes(memory) for memory in models.values()))
    for memory in models.values():
        least_bytes = _least_bytes(memory)
        needed_bytes += least_bytes if memory.is_kv_fixed else least_bytes / SHARE_OF_FREE_MEMORY[memory.device]
    if needed_bytes > free_bytes:
        names, are_several, needed = " and ".join(models), len(models) > 1, format_size(needed_bytes)
        need = f"{names} need {needed} together" if are_several else f"{names} needs {needed}"
        remedy = f"{'load: on-demand, ' * are_several}quantization or kv_cache_memory"
        raise StartError(f"models: {need}, {format_size(free_bytes)} are free; set {remedy}")


def _loaded_bytes(memory: ModelMemory) -> int:
    """What a model takes beside its KV cache."""
    return memory.process_bytes + memory.weights_bytes + memory.activations_bytes


def _least_bytes(memory: ModelMemory) -> int:
    return memory.kv_bytes if memory.is_kv_fixed else memory.least_kv_bytes


def _cache(memory: ModelMemory, level_bytes: int) -> int:
    """Bytes for a KV cache where every model gets level_bytes: at least its least, at most what it would take alone."""
    return max(_least_bytes(memory), min(level_bytes, memory.kv_bytes))


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """What a model takes of a device while it is loaded."""

    device: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class EvictionPlan:
    """Who must leave, so that another model has room. Knows bytes and names, no process and no clock.

    Attributes:
        budgets: Bytes of each device.
        needs: By model. One that is not planned is not counted, and always fits.
    """

    budgets: Mapping[str, int]
    needs: Mapping[str, MemoryNeed]

    def num_bytes(self, name: str) -> int | None:
        """What a model takes; None: it is not planned."""
        return self.needs[name].num_bytes if name in self.needs else None

    def device(self, name: str) -> str | None:
        """Where a model is loaded; None: it is not planned."""
        return self.needs[name].device if name in self.needs else None

    def lack(self, name: str, there: Collection[str]) -> int:
        """Bytes that are wanting for a model beside those that are there; 0 or less if it fits."""
        if (need := self.needs.get(name)) is None:
            return 0
        return need.num_bytes + self._taken(there, need.device) - self.budgets[need.device]

    def leavers(
        self, name: str, there: Collection[str], going: Collection[str], candidates: Sequence[str]
    ) -> Sequence[str] | None:
        """The first candidates that must leave besides those that are going; None if all together are too few.

        Args:
            there: All that are loaded, with those that are going.
            candidates: Those that may leave, in the order in which they should.
        """
        lack = self.lack(name, [other for other in there if other not in going])
        leavers: list[str] = []
        for candidate in candidates:
            if lack <= 0:
                break
            if freed := self._taken([candidate], self.needs[name].device):
                leavers.append(candidate)
                lack -= freed
        return leavers if lack <= 0 else None

    def _taken(self, names: Collection[str], device: str) -> int:
        needs = [self.needs[name] for name in names if name in self.needs]
        return sum(need.num_bytes for need in needs if need.device == device)
