"""A runner over a fake model: the next id is a function of the whole context, read through the block tables.

The cache holds token ids in place of keys and values, so a block that is shared, copied, freed or overwritten wrongly
changes the output. A state is the ids of all tokens so far. Launched steps run at once, but their ids reach the host
only at `collect`, as on a device.
"""

import itertools
import random
import zlib
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from tests.engine.cache.host_tier import HostTier
from tests.engine.paged import paged_specs
from weft.engine.batch import Batch, StepResult
from weft.engine.cache.events import RecordingCache
from weft.engine.cache.specs import CacheSpec, StateSpec
from weft.engine.loop.engine import Engine
from weft.engine.request import Outputs
from weft.engine.schedule.scheduler import Scheduler
from weft.engine.schedule.step_cost import StepCostModel
from weft.engine.wire.messages import TokenLogprobs

VOCAB_SIZE = 50


def next_id(context: list[int], choice_uniform: float, temperature: float) -> int:
    """What the fake model says behind a context; sampled rows depend on their random number as well."""
    key = ",".join(map(str, context)) + (f"/{choice_uniform:.6f}" if temperature else "")
    return zlib.crc32(key.encode()) % VOCAB_SIZE


def next_logprobs(context: list[int], count: int) -> TokenLogprobs:
    """What the fake model holds most probable behind a context; the sampled id's own value is not told."""
    generator = random.Random(zlib.crc32(",".join(map(str, context)).encode()))
    logprobs = [-5.0 * generator.random() for _ in range(VOCAB_SIZE)]
    best = sorted(range(VOCAB_SIZE), key=lambda i: -logprobs[i])[:count]
    return TokenLogprobs(0.0, best, [logprobs[i] for i in best])


@dataclass
class FakeLaunched:
    batch: Batch
    token_ids: list[int]
    logprobs: dict[int, TokenLogprobs]
    scores: list[TokenLogprobs]


class FakeRunner:
    """Checks, besides, that no step exceeds the token budget and that no slot is written twice in a step."""

    def __init__(
        self, windows: list[int | None], num_blocks: int, block_size: int, max_num_tokens: int, num_states: int = 0
    ) -> None:
        self._windows = windows
        self._states: list[list[int]] = [[] for _ in range(num_states + 1)]
        self._caches = [np.full(num_blocks * block_size, -1) for _ in windows]
        self._block_size = block_size
        self._max_num_tokens = max_num_tokens
        self._previous: list[int] = []
        self.fails_at_launch = self.fails_at_collect = False
        self.error: Exception = RuntimeError("it failed")
        self.is_device_lost = False
        self.num_computed_tokens = 0
        self.num_unprepared = 0
        self.batches: list[Batch] = []
        self.loads: list[tuple[int, str, Future[str]]] = []

    def launch(self, batch: Batch, masks: object = None) -> FakeLaunched:
        self.batches.append(batch)
        assert batch.num_tokens <= self._max_num_tokens
        if self.fails_at_launch:
            self.fails_at_launch = False
            raise self.error
        self.num_computed_tokens += batch.num_tokens
        token_ids = batch.token_ids.copy()
        for target, row in zip(batch.placeholders.targets, batch.placeholders.rows, strict=True):
            token_ids[target] = self._previous[row]
        states = self._compute_states(batch, token_ids.tolist()) if len(self._states) > 1 else None
        for group, cache in zip(batch.groups, self._caches, strict=False):
            sources = group.block_copies[:, 0]
            copied = cache.reshape(-1, self._block_size)[sources]
            cache.reshape(-1, self._block_size)[group.block_copies[:, 1]] = copied
            assert len(set(group.slot_mapping.tolist())) == batch.num_tokens
            cache[group.slot_mapping] = token_ids
        contexts = [self._context(batch, row, states) for row in range(len(batch.row_indices))]
        uniforms, temperatures = batch.sampling.uniforms.tolist(), batch.sampling.temperatures.tolist()
        self._previous = list(map(next_id, contexts, uniforms, temperatures))
        counts = enumerate(batch.sampling.num_logprobs.tolist())
        logprobs = {row: next_logprobs(contexts[row], count) for row, count in counts if count > 0}
        return FakeLaunched(batch, self._previous, logprobs, self._score(batch, token_ids))

    def collect(self, launched: FakeLaunched) -> StepResult:
        if self.fails_at_collect:
            self.fails_at_collect = False
            for group, cache in zip(launched.batch.groups, self._caches, strict=False):
                cache[group.slot_mapping] = -1  # it was never computed, so nobody may find it
            if len(self._states) > 1:
                for slot in launched.batch.groups[-1].block_tables[:, 0]:
                    self._states[slot] = [-1]
            raise self.error
        return StepResult(launched.token_ids, launched.logprobs, launched.scores)

    def load_adapter(self, slot: int, folder: Path) -> "Future[str]":
        """The test ends the load."""
        self.loads.append((slot, folder.name, future := Future()))
        return future

    def prepare(self) -> bool:
        self.num_unprepared -= self.num_unprepared > 0
        return self.num_unprepared > 0

    def check_device(self) -> None:
        if self.is_device_lost:
            raise RuntimeError("an illegal memory access was encountered")

    def _score(self, batch: Batch, token_ids: np.ndarray) -> list[TokenLogprobs]:
        """Scores that tell what was scored: the target as log-probability, the token before it as alternative."""
        if batch.scores is None:
            return []
        pairs = zip(batch.scores.target_ids.tolist(), batch.scores.token_indices.tolist(), strict=True)
        return [TokenLogprobs(float(target), [int(token_ids[index])], []) for target, index in pairs]

    def _compute_states(self, batch: Batch, token_ids: list[int]) -> list[list[int]]:
        """The state of each request after this step."""
        group = batch.groups[-1]
        copied = [list(self._states[source]) for source in group.block_copies[:, 0]]
        targets = group.block_copies[:, 1].tolist()
        assert len(set(targets)) == len(targets)
        for target, state in zip(targets, copied, strict=True):
            self._states[target] = state
        slots, bounds = group.block_tables[:, 0].tolist(), itertools.pairwise(batch.query_start_locs.tolist())
        assert len(set(slots)) == len(slots) and 0 not in slots
        for slot, (first, last), length in zip(slots, bounds, batch.seq_lens.tolist(), strict=True):
            before = self._states[slot] if length > last - first else []
            assert len(before) == length - (last - first), "a state is not where its request is"
            self._states[slot] = before + token_ids[first:last]
        return [self._states[slot] for slot in slots]

    def _context(self, batch: Batch, row: int, states: list[list[int]] | None) -> list[int]:
        index = int(batch.row_indices[row])
        request = int(np.searchsorted(batch.query_start_locs, index, side="right")) - 1
        length = int(batch.positions[index]) + 1
        contexts = [] if states is None else [states[request][:length]]
        for group, window, cache in zip(batch.groups, self._windows, self._caches, strict=False):
            positions = np.arange(0 if window is None else max(0, length - window), length)
            blocks = group.block_tables[request][positions // self._block_size]
            contexts.append(cache[blocks * self._block_size + positions % self._block_size].tolist())
        longest = max(contexts, key=len)
        assert all(longest[len(longest) - len(c) :] == c for c in contexts), "the groups disagree"
        assert min(longest) >= 0, "a slot was read that nobody wrote"
        return longest


@dataclass
class FakeEngine:
    engine: Engine
    runner: FakeRunner
    windows: list[int | None]

    def step(self) -> Outputs:
        return self.engine.step()


def make_engine(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    windows: tuple[int | None, ...] = (None,),
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 128,
    max_num_waiting: int = 1000,
    prefix_caching: bool = True,
    max_num_pinned_blocks: int = 0,
    itl_target_s: float = 1.0,
    eos_token_ids: tuple[int, ...] = (),
    overlap: bool = False,
    drafter: object = None,
    tier: HostTier | None = None,
    max_loras: int = 0,
    lora_modules_to_save: int = 0,
    num_kept_states: int | None = None,
    least_stop: int = 4,
) -> FakeEngine:
    """A model with states keeps so many beside those of running requests; None makes one without."""
    specs: list[CacheSpec] = list(paged_specs(*windows))
    num_states = 0 if num_kept_states is None else max_num_seqs + num_kept_states
    if num_states:
        specs.append(StateSpec((1,), torch.float32))
    kv = RecordingCache(
        num_blocks,
        block_size,
        specs,
        prefix_caching,
        max_num_pinned_blocks,
        num_states=num_states,
        tier=tier,
        least_stop=least_stop,
    )
    scheduler = Scheduler(
        kv,
        StepCostModel(),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        itl_target_s=itl_target_s,
    )
    runner = FakeRunner(list(windows), num_blocks, block_size, max_num_batched_tokens, num_states)
    if tier is not None:
        tier.caches = [[torch.from_numpy(cache.reshape(num_blocks, -1))] for cache in runner._caches]
    engine = Engine(
        scheduler,
        runner,  # type: ignore[arg-type]
        vocab_size=VOCAB_SIZE,
        max_model_len=min(max_model_len, (num_blocks - 1) * block_size),
        max_num_waiting=max_num_waiting,
        eos_token_ids=eos_token_ids,
        max_loras=max_loras,
        lora_modules_to_save=lora_modules_to_save,
        overlap=overlap,
        drafters=(drafter,) if drafter else (),  # type: ignore[arg-type]
    )
    return FakeEngine(engine, runner, [*windows, *([None] if num_states else [])])
