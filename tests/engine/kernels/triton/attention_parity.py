"""Checks of `kernels.triton.attention` against attention in float64, on any device: Triton's interpreter or a GPU.

Imported where triton is: by the tests that run interpreted, and by those that need a GPU.
"""

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from tests.engine.kernels.triton.prompts import attend_to_one
from tests.engine.paged import NO_COPIES, NO_INTS, PagedRequest, PagedRequests
from weft.engine.batch import Batch, GraphKey
from weft.engine.batch_inputs import PictureTokens
from weft.engine.cache.specs import CacheGroup, PagedKV
from weft.engine.kernels.torch.mutual_step import MutualCaches
from weft.engine.kernels.triton.attention import TritonBackend, TritonStep
from weft.engine.kernels.triton.attention_tiles import BatchLimits, TileNames
from weft.engine.kernels.triton.layer_kernels import TritonKernels
from weft.engine.kernels.triton.prompts import (
    FlashAttention2,
    PromptAttention,
    PromptLayers,
    Prompts,
    PromptStep,
    installed_libraries,
)
from weft.engine.layers.block import AttentionStep

NUM_BLOCKS = 130
LIMITS = BatchLimits(max_num_seqs=8, max_num_batched_tokens=2048, max_model_len=2048)
TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Case:
    """Sizes of a layer and its cache, and the lengths of the requests."""

    num_kv_heads: int = 2
    num_shared: int = 2
    head_dim: int = 64
    block_size: int = 16
    window: int | None = None
    dtype: torch.dtype = torch.float16
    cache_dtype: torch.dtype | None = None
    is_deterministic: bool = False
    lengths: tuple[int, ...] = (1, 5, 70)
    scale: float | None = None
    soft_cap: float | None = None
    tiles: TileNames | None = None
    latent_dim: int | None = None
    span: int | None = None
    has_slopes: bool = False
    has_sinks: bool = False
    has_scales: bool = False

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.num_shared

    @property
    def spec(self) -> PagedKV:
        slopes = tuple(0.5 / (head + 1) for head in range(self.num_heads)) if self.has_slopes else ()
        kind = (self.window, self.scale, self.soft_cap, self.latent_dim, self.span, slopes, self.has_sinks)
        return PagedKV(self.num_kv_heads, self.head_dim, *kind)


@dataclass(eq=False)
class Tokens:
    """A request, and queries, keys and values of all of its tokens as slices of one tensor."""

    request: PagedRequest
    qkv: torch.Tensor


class Harness:
    """One layer over a cache in which other requests have left not-a-numbers, the null block excepted."""

    def __init__(self, case: Case, device: torch.device, prompts: PromptAttention | None = None) -> None:
        self.case, self.device = case, device
        groups = (CacheGroup(case.spec, (0,)),)
        both = torch.arange(1.0, 1 + 2 * case.num_kv_heads).view(2, -1)  # of keys, then of values
        self.scales = (both if case.has_scales else torch.ones_like(both)).to(device)
        self.backend = TritonBackend(
            groups,
            NUM_BLOCKS,
            case.block_size,
            case.dtype,
            device,
            num_heads=case.num_heads,
            limits=LIMITS,
            cache_dtype=case.cache_dtype,
            is_deterministic=case.is_deterministic,
            tiles=case.tiles,
            prompts=prompts,
            scales={0: self.scales} if case.has_scales else None,
        )
        self.cache = self.backend._caches[0]
        # All bits set are a not-a-number in each of the types.
        self.cache[1:].view(torch.uint8).fill_(255)
        self.paged = PagedRequests(NUM_BLOCKS, case.block_size, (case.spec,))
        self.sinks = torch.linspace(4, -30, case.num_heads, device=device) if case.has_sinks else None

    def add(self, num_tokens: int, seed: int) -> Tokens:
        generator = torch.Generator().manual_seed(seed)
        num_heads = self.case.num_heads + 2 * self.case.num_kv_heads
        qkv = torch.randn(num_tokens, num_heads, self.case.head_dim, generator=generator)
        return Tokens(self.paged.add(np.zeros(num_tokens, np.int64)), qkv.to(self.device, self.case.dtype))

    def fill(self, tokens: Tokens, stop: int) -> None:
        """Put K/V of the tokens before stop into the cache, as if steps had computed them."""
        blocks, places = self._places(tokens, stop)
        _, *parts = tokens.qkv[:stop].split_with_sizes(
            (self.case.num_heads, self.case.num_kv_heads, self.case.num_kv_heads), dim=1
        )
        kept = self.rounded(torch.stack(parts[: self.case.spec.num_sides], 1))
        self.cache.view(torch.uint8)[blocks, :, :, places] = kept.view(torch.uint8)
        tokens.request.num_computed_tokens = stop

    def rounded(self, sides: torch.Tensor) -> torch.Tensor:
        """(num_tokens, 1 or 2, num_kv_heads, head_dim) as the cache keeps them."""
        return (sides / self.scales[: sides.shape[1], :, None] if self.case.has_scales else sides).to(self.cache.dtype)

    def _places(self, tokens: Tokens, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Block, and place in it, of each token before stop."""
        at, block_size = np.arange(stop), self.case.block_size
        blocks = torch.from_numpy(tokens.request.tables[0][at // block_size])
        return blocks.to(self.device), torch.from_numpy(at % block_size).to(self.device)

    def attend(self, batch: Batch, qkv: torch.Tensor) -> torch.Tensor:
        return self.attend_with(self.backend.begin(batch), qkv)

    def attend_with(self, step: AttentionStep, qkv: torch.Tensor) -> torch.Tensor:
        """Write K/V as layers do, which here turn and scale nothing, and attend."""
        num_tokens, _, head_dim = qkv.shape
        if self.case.latent_dim is not None:
            queries, keys, _ = qkv.split_with_sizes((self.case.num_heads, 1, 1), 1)
            with torch.inference_mode():
                return step.attend(0, (queries, keys, keys[..., : self.case.latent_dim]))
        cache, sizes = step.cache(0), (self.case.num_heads, self.case.num_kv_heads)
        assert cache is not None
        if self.device.type == "cpu" and num_tokens > 20:  # the interpreter would write for longer than it attends
            queries, *kv = qkv.split_with_sizes((*sizes, sizes[1]), 1)
            slots = cache.slots[:num_tokens].long()
            blocks, places = slots[slots >= 0] // self.case.block_size, slots[slots >= 0] % self.case.block_size
            kept = self.rounded(torch.stack(kv, 1)[slots >= 0])
            cache.blocks.view(torch.uint8)[blocks, :, :, places] = kept.view(torch.uint8)
            return step.attend(0, (queries, kv[0], kv[1]), self.sinks)
        rotation = torch.tensor([1.0, 0.0])[:, None].expand(num_tokens, 2, head_dim).contiguous()
        heads = TritonKernels().heads(None, *sizes)
        with torch.inference_mode():
            return step.attend(0, heads(qkv.clone(), rotation.to(qkv), cache), self.sinks)

    def step(self, scheduled: Sequence[tuple[Tokens, int]], copies: np.ndarray = NO_COPIES) -> list[torch.Tensor]:
        """Compute the next n tokens of each; returns their attention outputs."""
        spans = [slice(t.request.num_computed_tokens, t.request.num_computed_tokens + n) for t, n in scheduled]
        qkv = torch.cat([tokens.qkv[span] for (tokens, _), span in zip(scheduled, spans, strict=True)])
        batch = self.paged.make_batch([(tokens.request, n) for tokens, n in scheduled], copies)
        return list(self.attend(batch, qkv).split([n for _, n in scheduled]))

    def capture(self, graph: GraphKey) -> TritonStep:
        """What is launched in a graph, which is recorded with padding alone."""
        batch = self.paged.make_batch([(self.paged.add(NO_INTS), 0)])
        group = dataclasses.replace(batch.groups[0], block_tables=np.zeros((0, 1), np.int64))
        none = {"query_start_locs": np.zeros(1, np.int64), "seq_lens": NO_INTS, "groups": (group,), "graph": graph}
        return self.backend.begin(dataclasses.replace(batch, **none))

    def replay(
        self, captured: TritonStep, requests: list[Tokens], graph: GraphKey, counts: Sequence[int] | None = None
    ) -> list[torch.Tensor]:
        """Compute the next tokens of each, one if not told, by what was captured; nothing but these is touched."""
        counts = counts or [1] * len(requests)
        scheduled = [(tokens.request, count) for tokens, count in zip(requests, counts, strict=True)]
        spans = [slice(r.num_computed_tokens, r.num_computed_tokens + count) for r, count in scheduled]
        qkv = torch.cat([tokens.qkv[span] for tokens, span in zip(requests, spans, strict=True)])
        batch = dataclasses.replace(self.paged.make_batch(scheduled), graph=graph)
        before = self.cache.view(torch.uint8).clone()
        self.backend.begin(batch)
        padding = requests[0].qkv[:1].expand(graph.num_tokens - len(qkv), *qkv.shape[1:])
        outputs, rest = self.attend_with(captured, torch.cat((qkv, padding))).tensor_split([len(qkv)])
        assert not rest.any(), "padding gets zeros"
        is_other = torch.ones(before.shape[:1] + before.shape[3:4], dtype=torch.bool, device=self.device)
        slots = torch.from_numpy(batch.groups[0].slot_mapping).to(self.device)
        is_other.view(-1)[slots] = False
        after = self.cache.view(torch.uint8)
        assert torch.equal(after.movedim(3, 1)[is_other], before.movedim(3, 1)[is_other]), "padding writes nothing"
        return list(outputs.split(list(counts)))

    def expected(self, tokens: Tokens, picture: tuple[int, int] = (0, 0)) -> torch.Tensor:
        """The attention output of every token; those from the first to the second of a picture see each other."""
        case = self.case
        queries, keys, values = tokens.qkv.split_with_sizes((case.num_heads, case.num_kv_heads, case.num_kv_heads), 1)
        if case.cache_dtype:
            keys, values = [*self.kept(tokens, *(keys, values)[: case.spec.num_sides]), values][:2]
        values = values if case.latent_dim is None else keys[..., : case.latent_dim]
        keys, values = (part.double().repeat_interleave(case.num_shared, 1) for part in (keys, values))
        at = torch.arange(len(queries), device=self.device)
        distances = at[:, None] - at[None, :]
        is_inside = (at >= picture[0]) & (at < picture[1])
        is_seen = (distances >= 0) | (is_inside[:, None] & is_inside)
        is_seen &= distances < (case.window or len(queries))
        scores = torch.einsum("qhd,khd->hqk", queries.double(), keys) * (case.scale or case.head_dim**-0.5)
        if case.soft_cap:
            scores = case.soft_cap * torch.tanh(scores / case.soft_cap)
        if case.span:
            is_seen &= at[:, None] // case.span == at // case.span
        if case.has_slopes:
            scores -= torch.tensor(case.spec.slopes, device=self.device)[:, None, None] * distances
        maxima = scores.masked_fill(~is_seen, float("-inf")).amax(-1, keepdim=True)
        weights = (scores - maxima).exp() * is_seen
        sums = weights.sum(-1, keepdim=True)
        if self.sinks is not None:
            sums += (self.sinks[:, None, None] - maxima).exp()
        return torch.einsum("hqk,khd->qhd", weights / sums, values)

    def kept(self, tokens: Tokens, *parts: torch.Tensor) -> list[torch.Tensor]:
        """Keys and values as the cache has them, and as given where they are not computed yet."""
        stop = tokens.request.num_computed_tokens
        blocks, places = self._places(tokens, stop)
        kept = [
            cached * scale[:, None]
            for cached, scale in zip(self.cache.float()[blocks, :, :, places].unbind(1), self.scales, strict=False)
        ]
        if self.device.type == "cuda":  # the interpreter of Triton 3.9 loses the carry of values that are rounded up
            for part, scale, rounded in zip(parts, self.scales, kept, strict=False):
                scaled = (part[:stop] / scale[:, None]).to(self.case.cache_dtype).float() * scale[:, None]
                assert torch.equal(scaled, rounded)
        return [torch.cat((new, part[stop:].float())) for part, new in zip(parts, kept, strict=True)]

    def check(self, tokens: Tokens, outputs: torch.Tensor) -> None:
        """Compare with the last tokens that were computed."""
        stop = tokens.request.num_computed_tokens
        expected = self.expected(tokens)[stop - len(outputs) : stop]
        tolerance = TOLERANCES[self.case.dtype]
        torch.testing.assert_close(outputs.double(), expected, atol=tolerance, rtol=tolerance)


def check_mixed_steps(case: Case, device: torch.device) -> None:
    """Prefill in chunks and decode, several requests at a time, until all tokens are computed."""
    chance = random.Random(str(case))
    harness = Harness(case, device)
    requests = [harness.add(length, seed) for seed, length in enumerate(case.lengths)]
    while lefts := [(t, len(t.qkv) - t.request.num_computed_tokens) for t in requests]:
        picked = [(t, min(left, chance.choice((1, 3, 17, 60, 2000)))) for t, left in lefts if chance.random() < 0.8]
        if picked:
            for (tokens, _), outputs in zip(picked, harness.step(picked), strict=True):
                harness.check(tokens, outputs)
        requests = [t for t in requests if t.request.num_computed_tokens < len(t.qkv)]


def check_pictures(case: Case, device: torch.device) -> None:
    """The tokens of two pictures see each other; the first tokens of one of these are cached."""
    harness = Harness(case, device)
    begun, other = harness.add(100, 0), harness.add(60, 1)
    harness.fill(begun, 30)
    runs = [(begun, 20, 80), (other, 5, 25)]
    batch = harness.paged.make_batch([(begun.request, 70), (other.request, 60)])
    targets = np.arange(50), np.arange(75, 95)
    tokens = tuple(PictureTokens(b"", at, 0) for at in targets)
    step = MutualCaches(frozenset({0}), device).begin(harness.backend, dataclasses.replace(batch, pictures=tokens))
    outputs = harness.attend_with(step, torch.cat((begun.qkv[30:], other.qkv)))
    for (request, first, end), found in zip(runs, outputs.split((70, 60)), strict=True):
        num_new = len(found)
        expected = harness.expected(request, (first, end))[-num_new:]
        tolerance = TOLERANCES[case.dtype]
        torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)


def check_libraries(case: Case, device: torch.device) -> None:
    """Every installed library, or on the CPU one that takes what it is offered: prompts that begin, and that go on."""
    on_gpu = [make() for make in installed_libraries(device).values()] if device.type == "cuda" else []
    for library in on_gpu or [TorchLibrary()]:
        seen = Recording(library)
        harness = Harness(case, device, seen)
        if not library.supports(harness.backend._layers[0]):
            continue
        old, *new = [harness.add(length, seed) for seed, length in enumerate((40, 33, 12, 140))]
        harness.fill(old, 35)
        steps = [
            [(old, 1), (new[0], 30), (new[1], 12)],  # decodes first
            [(new[2], 5), (old, 1), (new[0], 1)],
            [(new[2], 130), (old, 1), (new[0], 2)],  # goes on
            [(old, 1), (new[2], 5)],  # goes on with too few tokens
        ]
        for scheduled in steps:
            for (tokens, _), outputs in zip(scheduled, harness.step(scheduled), strict=True):
                harness.check(tokens, outputs)
        fresh = [[0, 30, 42], [0, 5]]
        if isinstance(library, FlashAttention2):
            assert seen.taken == (fresh if case.window is None else [[0, 5]])
        else:
            assert seen.taken == [*fresh, [0, 130, 131, 133]]


class Recording:
    """A library, and the starts of the prompts that it took."""

    def __init__(self, library: PromptAttention) -> None:
        self.name, self.needs = library.name, library.needs
        self._library = library
        self.taken: list[list[int]] = []

    def supports(self, layers: PromptLayers) -> bool:
        return self._library.supports(layers)

    def begin(self, prompts: Prompts, layers: PromptLayers) -> PromptStep | None:
        step = self._library.begin(prompts, layers)
        if step:
            self.taken.append(step.starts.tolist())
        return step


class TorchLibrary:
    """A library for any device, which reads the cache and the step's own keys and values, and compares both."""

    name, needs = "torch", "nothing"

    def supports(self, layers: PromptLayers) -> bool:
        return True

    def begin(self, prompts: Prompts, layers: PromptLayers) -> PromptStep:
        return PromptStep(prompts.tokens, prompts.starts, TorchStep(prompts, layers).attend)


@dataclass(frozen=True)
class TorchStep:
    prompts: Prompts
    layers: PromptLayers

    def attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, starts: torch.Tensor
    ) -> torch.Tensor:
        rows = []
        found = zip(pairwise(starts.tolist()), self.prompts.seq_lens, self.prompts.block_tables, strict=True)
        for (start, stop), num_keys, table in found:
            blocks, places = np.divmod(np.arange(num_keys), self.layers.block_size)
            seen = cache[torch.from_numpy(table[blocks]), :, :, torch.from_numpy(places)].unbind(1)
            for side, new in zip(seen, (keys, values), strict=True):
                assert torch.equal(side[start - stop :], new[start:stop])
            left, cap = self.layers.window_left, self.layers.spec.soft_cap or 0.0
            rows.append(attend_to_one(queries[start:stop], *seen, self.layers.spec.score_scale, left, cap))
        return torch.cat(rows)


def check_decodes(case: Case, device: torch.device) -> None:
    """A decode step of unlike contexts, one of them long enough to be split, padded and not."""
    harness = Harness(case, device)
    requests = [harness.add(length, seed) for seed, length in enumerate(case.lengths)]
    for tokens in requests:
        harness.fill(tokens, len(tokens.qkv) - 2)
    for tokens, outputs in zip(requests, harness.step([(t, 1) for t in requests]), strict=True):
        harness.check(tokens, outputs)
    graph = GraphKey(len(requests) + 3, True)
    for tokens, outputs in zip(requests, harness.replay(harness.capture(graph), requests, graph), strict=True):
        harness.check(tokens, outputs)


def check_copies(case: Case, device: torch.device) -> None:
    """A fork shares full blocks and copies the one that both go on in, before the step writes."""
    harness = Harness(case, device)
    length = case.block_size + 4
    original, fork = harness.add(length + 1, 0), harness.add(length + 1, 1)
    fork.qkv[:length] = original.qkv[:length]
    harness.fill(original, length)
    fork.request.tables[0][0] = original.request.tables[0][0]
    fork.request.num_computed_tokens = length
    copies = np.array([[original.request.tables[0][1], fork.request.tables[0][1]]])
    for tokens, outputs in zip((original, fork), harness.step([(original, 1), (fork, 1)], copies), strict=True):
        harness.check(tokens, outputs)


def check_recorded_steps(case: Case, device: torch.device) -> None:
    """A graph computes any later step of as many tokens or fewer: prompts, chunks, drafts to verify, decodes."""
    harness = Harness(case, device)
    requests = [harness.add(length, seed) for seed, length in enumerate(case.lengths)]
    steps = ((72, (1, 2, 60)), (10, (3, 1, 1)), (72, (20, 17, 4)))
    for tokens, counts in zip(requests, zip(*(counts for _, counts in steps), strict=True), strict=True):
        harness.fill(tokens, len(tokens.qkv) - sum(counts))
    graphs = {size: harness.capture(GraphKey(size, False)) for size in (72, 10)}
    for size, counts in steps:
        replayed = harness.replay(graphs[size], requests, GraphKey(size, False), counts)
        for tokens, outputs in zip(requests, replayed, strict=True):
            harness.check(tokens, outputs)


def check_invariance(case: Case, device: torch.device) -> None:
    """The bits of a request's results do not depend on its neighbours, nor on the sizes of its chunks."""
    case = dataclasses.replace(case, is_deterministic=True)
    length = max(case.lengths)
    results = []
    for sizes, num_others in (((length,), 0), ((33, 1, 5, length), 3), ((length - 1, 1), 2)):
        harness = Harness(case, device)
        tokens, others = harness.add(length, 0), [harness.add(length, 1 + i) for i in range(num_others)]
        outputs = []
        for index in range(length):
            left = length - tokens.request.num_computed_tokens
            if not left:
                break
            size = min(left, sizes[min(index, len(sizes) - 1)])
            busy = [(t, 1 + index % 2) for t in others]
            outputs.append(harness.step([*busy[::2], (tokens, size), *busy[1::2]])[len(busy[::2])])
        results.append(torch.cat(outputs).view(torch.uint8))
        harness.check(tokens, torch.cat(outputs))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


F32 = torch.float32
MIXED = [
    Case(1),
    Case(1, 1, 64, 32, dtype=F32),
    Case(2, 3, 80, 16, 20),
    Case(1, 8, 128, 64, 7, F32),
    Case(1, 5, 96, 32, 1),
    Case(1, 4, 256, 16, dtype=F32),
    Case(1, 2, 256, 32),
    Case(1, 7, 64, 24, 40),
    Case(2, 2, 128, 256),
    Case(1, 4, 64, 16, cache_dtype=FP8),
    Case(2, 2, 64, 16, cache_dtype=FP8, has_scales=True, has_sinks=True, soft_cap=3.0),
    Case(1, 2, 64, 16, is_deterministic=True),
    Case(1, 2, 64, 16, scale=0.3, soft_cap=2.0, dtype=F32),
    Case(1, 3, 80, 16, scale=0.3, dtype=F32, latent_dim=64),
    Case(1, 20, 40, 32, latent_dim=32),  # a token's heads fill more than one tile
    Case(1, 4, 48, 16, cache_dtype=FP8, latent_dim=32),
    Case(2, 2, 64, 16, 20, soft_cap=0.5),
    # Scores in the tens of thousands, whose exponentials are infinite and zero.
    Case(1, 2, 64, 16, scale=2e3, soft_cap=3.0, dtype=F32),
    Case(1, 2, 64, 16, soft_cap=1.0, cache_dtype=FP8),
    Case(1, 3, 64, 16, has_slopes=True, has_sinks=True, dtype=F32),
    Case(2, 2, 64, 16, span=20, has_sinks=True),
]
DECODES = [
    Case(lengths=(2, 700, 66)),
    Case(1, 4, 128, 16, 300, F32, lengths=(2, 600)),
    Case(1, 2, 64, 32, cache_dtype=FP8, lengths=(3, 400)),
    Case(2, 2, 64, 32, cache_dtype=FP8, lengths=(3, 400), has_scales=True),
    Case(1, 2, 64, 16, is_deterministic=True, lengths=(2, 200)),
    Case(1, 2, 64, 16, scale=0.2, soft_cap=1.0, lengths=(2, 600)),
    Case(1, 2, 256, 16, 300, soft_cap=1.0, dtype=F32, lengths=(2, 500)),
    Case(1, 2, 64, 16, 40, soft_cap=1.0, cache_dtype=FP8, lengths=(2, 300)),
    Case(1, 20, 48, 16, dtype=F32, lengths=(2, 600), latent_dim=32),
    Case(1, 2, 64, 16, span=300, has_slopes=True, has_sinks=True, lengths=(2, 590)),
]
PICTURES = [Case(1, dtype=F32), Case(1, 2, 64, 16, 12), Case(1, 2, 64, 16, 40, soft_cap=3.0, is_deterministic=True)]
LIBRARIES = [Case(1), Case(1, 4, 128, 32, window=20)]
TILED = [
    Case(1, 2, 128, tiles=TileNames(decode, prompts), lengths=(2, 150))
    for decode, prompts in (("triton-16k", "triton-128"), ("triton-32k", "triton-64"))
]
COPIES = [Case(), Case(cache_dtype=FP8, block_size=32), Case(1, latent_dim=48)]
RECORDED = [
    Case(lengths=(24, 20, 70)),
    Case(1, 2, 64, 32, dtype=F32, lengths=(300, 20, 700)),  # both launches split contexts
    Case(1, 4, 64, 16, 150, F32, lengths=(24, 20, 500)),
    Case(1, 4, lengths=(24, 20, 100), is_deterministic=True, has_sinks=True),
    Case(1, 4, 48, dtype=F32, lengths=(300, 20, 500), latent_dim=32),
]
INVARIANT = [
    Case(1, lengths=(100,)),
    Case(1, 4, 48, lengths=(60,), latent_dim=32),
    Case(1, 4, 64, 16, 30, F32, lengths=(60,)),
]
