"""Which replica a request goes to: the one that has most of its prompt in its cache, unless that is busy.

Consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam 2016) over known prefixes, and rendezvous hashing
(Thaler, Ravishankar 1998) for unknown ones, so that routers that share nothing agree. Imports nothing of Ray.
"""

import hashlib
from collections import Counter, OrderedDict, deque
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_OUT_OF_REACH = 1 << 40
"""Stands for the load of replicas that may not be chosen."""
_MAX_HOMES = 8
"""Most replicas remembered for a prefix. One with so many is in every cache soon: what follows it decides."""


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """What a replica last said of itself.

    Attributes:
        id: Its name, the same in every router.
        running: Requests that it computes.
        waiting: Requests in its queue.
        kv_usage: Share of its cache in use, 0 to 1.
        alive: Whether its engine runs.
        models: Names of the models and adapters that it serves.
        loras: Names of the adapters that it has loaded.
    """

    id: str
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    alive: bool = True
    models: Collection[str] = ()
    loras: Collection[str] = ()


_BLOCK_CHARS, _MAX_BLOCKS = 256, 64
"""Prompts are compared in blocks of so many characters, and so many blocks of each."""
_RECENT_S = 1.0
"""How long a pick counts as load of a replica, unless its statistics show it before."""


class PrefixPolicy:
    """Remembers where prefixes went. A pick takes tens of microseconds, also among a thousand replicas."""

    def __init__(self, *, max_prefixes: int = 1_000_000, slack: int = 4) -> None:
        """Take the limits.

        Args:
            max_prefixes: Most prefixes remembered; those used longest ago are forgotten.
            slack: A prompt follows its prefix to a replica with at most so many requests more than the mean. (The least
                busy of a thousand has nearly none: bound to that, most prompts would leave their prefix.)
        """
        self._max_prefixes, self._slack = max_prefixes, slack
        self._homes: OrderedDict[int, tuple[str, ...]] = OrderedDict()
        self._picks: deque[tuple[float, str]] = deque()
        self._unseen: Counter[str] = Counter()  # picks that statistics do not show yet
        self._seen: Counter[str] = Counter()  # picks that they do, but that are still in the queue of picks
        self._replicas: tuple[ReplicaView, ...] = ()
        self._index: dict[str, int] = {}
        self._seeds = np.zeros(0, np.uint64)
        self._shown = self._load = np.zeros(0, np.int64)
        self._kv_usage = np.zeros(0)
        self._reach: dict[str | None, npt.NDArray[np.bool_]] = {}
        self._has_loaded: dict[str, npt.NDArray[np.bool_] | None] = {}

    def choose(
        self, replicas: tuple[ReplicaView, ...], prompt: str | bytes, now: float, model: str | None = None
    ) -> ReplicaView | None:
        """Pick the replica for a prompt, and remember it.

        Args:
            replicas: All of them. Pass the same tuple while nothing has changed: a new one is read in full.
            prompt: Text of the request, its oldest part first.
            now: Seconds on a clock that never goes back.
            model: What the request asks for: only replicas that serve it are chosen, if there are any. Of an adapter
                those come first that have it loaded, unless they are all busy.

        Returns:
            None if there are no replicas.
        """
        if replicas is not self._replicas:
            self._read(replicas)
        if not replicas:
            return None
        self._expire(now)
        within = self._within_reach(model)
        load = np.where(within, self._load, _OUT_OF_REACH)
        mean = int(self._load @ within) // int(within.sum())
        loaded = self._loaded(model)
        if loaded is not None and int(np.where(loaded, load, _OUT_OF_REACH).min()) <= mean + self._slack // 2:
            load = np.where(loaded, load, _OUT_OF_REACH)
        hashes = self._hashes(prompt, model)
        num_shared = self._num_shared(hashes)
        index = self._home(hashes[num_shared:], load, mean + self._slack)
        if index is None and prompt:
            start = min(num_shared, len(hashes) - 1) * _BLOCK_CHARS
            block = prompt[start : start + _BLOCK_CHARS]
            index = self._rendezvous(block, model, load <= mean + self._slack // 2)
        elif index is None:
            index = int(np.argmin(load + self._kv_usage / 2))
        self._remember(hashes, replicas[index].id, now)
        self._load[index] += 1
        return replicas[index]

    def _read(self, replicas: tuple[ReplicaView, ...]) -> None:
        """Take new statistics. What the load of a replica rose by are its oldest picks, which so are seen."""
        shown = np.array([r.running + r.waiting for r in replicas], np.int64)
        index = {replica.id: i for i, replica in enumerate(replicas)}
        for name in list(self._unseen):
            if name in index and name in self._index:
                rise = int(shown[index[name]] - self._shown[self._index[name]])
                seen = min(max(rise, 0), self._unseen[name])
                self._unseen[name] -= seen
                self._seen[name] += seen
        if index != self._index:
            digests = b"".join(hashlib.blake2b(name.encode(), digest_size=8).digest() for name in index)
            self._seeds = np.frombuffer(digests, np.uint64)
        self._replicas, self._index, self._shown, self._reach, self._has_loaded = replicas, index, shown, {}, {}
        self._load = shown + np.array([self._unseen[name] for name in index], np.int64)
        self._kv_usage = np.array([r.kv_usage for r in replicas])

    def _expire(self, now: float) -> None:
        while self._picks and self._picks[0][0] <= now - _RECENT_S:
            name = self._picks.popleft()[1]
            if self._seen[name]:
                self._lower(self._seen, name)
            else:
                self._lower(self._unseen, name)
                if name in self._index:
                    self._load[self._index[name]] -= 1

    @staticmethod
    def _lower(counts: Counter[str], name: str) -> None:
        counts[name] -= 1
        if not counts[name]:
            del counts[name]

    def _within_reach(self, model: str | None) -> npt.NDArray[np.bool_]:
        """(replicas,) where the request may go."""
        if model not in self._reach:
            alive = np.array([r.alive for r in self._replicas])
            alive |= not alive.any()
            has = alive & np.array([model is None or model in r.models for r in self._replicas])
            self._reach[model] = has if has.any() else alive
        return self._reach[model]

    def _loaded(self, model: str | None) -> npt.NDArray[np.bool_] | None:
        """(replicas,) which of those within reach have the adapter of that name loaded; None if none has."""
        if model is None:
            return None
        if model not in self._has_loaded:
            has = self._within_reach(model) & np.array([model in r.loras for r in self._replicas])
            self._has_loaded[model] = has if has.any() else None
        return self._has_loaded[model]

    def _hashes(self, prompt: str | bytes, model: str | None) -> list[int]:
        """Hashes of the prefixes of 1, 2 ... whole blocks; of all of a prompt that is shorter than a block."""
        size, value, hashes = _BLOCK_CHARS, hash(model), []
        for block in range(min(max(len(prompt) // size, 1), _MAX_BLOCKS) if prompt else 0):
            value = hash((value, prompt[block * size : (block + 1) * size]))
            hashes.append(value)
        return hashes

    def _num_shared(self, hashes: list[int]) -> int:
        """How many prefixes have as many homes as are remembered."""
        for number, value in enumerate(hashes):
            if len(self._homes.get(value, ())) < _MAX_HOMES:
                return number
        return len(hashes)

    def _home(self, hashes: list[int], load: npt.NDArray[np.int64], most: int) -> int | None:
        """The least busy home of the longest known prefix that has one with room."""
        for value in reversed(hashes):
            known = [self._index[name] for name in self._homes.get(value, ()) if name in self._index]
            if fits := [i for i in known if load[i] <= most]:
                return min(fits, key=lambda i: (load[i], self._kv_usage[i]))
        return None

    def _rendezvous(self, block: str | bytes, model: str | None, free: npt.NDArray[np.bool_]) -> int:
        """The free replica whose hash with a block is highest, the same in every router (splitmix64)."""
        text = block if isinstance(block, bytes) else block.encode("utf-8", "replace")
        digest = hashlib.blake2b(text, digest_size=8, key=(model or "").encode()[:64]).digest()
        mixed = self._seeds ^ np.frombuffer(digest, np.uint64)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return int(np.argmax(np.where(free, (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1), np.uint64(0))))

    def _remember(self, hashes: list[int], name: str, now: float) -> None:
        self._picks.append((now, name))
        self._unseen[name] += 1
        only = (name,)
        for value in hashes:
            homes = self._homes.setdefault(value, only)
            if name not in homes:
                self._homes[value] = (*homes[1 - _MAX_HOMES :], name)
            self._homes.move_to_end(value)
        while len(self._homes) > self._max_prefixes:
            self._homes.popitem(last=False)
