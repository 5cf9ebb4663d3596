"""native.py, in every instruction set that runs here: against attention in float64, and bit for bit against itself."""

import dataclasses
import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from tests.engine.paged import NO_COPIES, PagedRequest, PagedRequests
from weft.engine.cache.specs import CacheGroup, PagedKV
from weft.engine.kernels.cpu.attention import NativeBackend, supports
from weft.engine.kernels.cpu.library import FirstTouch, NativeLibrary

NUM_BLOCKS = 250
CPU = torch.device("cpu")
TOLERANCE = 2e-2
"""Weights and results are bfloat16, which has 8 bits of mantissa."""


@dataclass(frozen=True)
class Shape:
    num_kv_heads: int = 2
    num_shared: int = 2
    head_dim: int = 64
    block_size: int = 16
    window: int | None = None
    scale: float | None = None
    latent_dim: int | None = None
    soft_cap: float | None = None
    span: int | None = None
    has_slopes: bool = False
    has_sinks: bool = False
    has_bias: bool = False
    cache_dtype: torch.dtype = torch.bfloat16

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.num_shared

    @property
    def spec(self) -> PagedKV:
        slopes = tuple(0.5 / (head + 1) for head in range(self.num_heads)) if self.has_slopes else ()
        kind = (self.window, self.scale, self.soft_cap, self.latent_dim, self.span, slopes, self.has_sinks)
        return PagedKV(self.num_kv_heads, self.head_dim, *kind, has_bias=self.has_bias)


@dataclass(eq=False)
class Tokens:
    """A request, and queries, keys and values of all of its tokens as slices of one tensor."""

    request: PagedRequest
    qkv: torch.Tensor


def random_qkv(shape: Shape, num_tokens: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    num_heads = shape.num_heads + 2 * shape.num_kv_heads
    return torch.randn(num_tokens, num_heads, shape.head_dim, generator=generator).bfloat16()


def sinks_of(shape: Shape) -> torch.Tensor | None:
    """Logits around the largest of a score, one far above and one far below all of them."""
    return torch.linspace(-300, 4, shape.num_heads).flip(0) if shape.has_sinks else None


def bias_of(shape: Shape) -> torch.Tensor | None:
    """A number for each head and distance."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape.num_heads, 2 * 1200, generator=generator) * 2 if shape.has_bias else None


class Harness:
    """One layer over a cache in which other requests have left `garbage`, the null block excepted."""

    def __init__(self, library: NativeLibrary, shape: Shape, garbage: float = float("nan"), seed: int = 0) -> None:
        self.shape = shape
        groups = (CacheGroup(shape.spec, (0,)),)
        self.sinks, self.bias = sinks_of(shape), bias_of(shape)
        own = torch.bfloat16, CPU, library, shape.cache_dtype
        self.backend = NativeBackend(groups, NUM_BLOCKS, shape.block_size, *own)
        self.blocks = self.backend._caches[0].view(NUM_BLOCKS, -1).view(torch.bfloat16)
        self.blocks[1:] = garbage
        self.paged = PagedRequests(NUM_BLOCKS, shape.block_size, (shape.spec,), seed)

    def add(self, num_tokens: int, seed: int) -> Tokens:
        return Tokens(self.paged.add(np.zeros(num_tokens, np.int64)), random_qkv(self.shape, num_tokens, seed))

    def step(self, scheduled: Sequence[tuple[Tokens, int]], copies: np.ndarray = NO_COPIES) -> list[torch.Tensor]:
        """Compute the next n tokens of each; returns their attention outputs."""
        spans = [slice(t.request.num_computed_tokens, t.request.num_computed_tokens + n) for t, n in scheduled]
        qkv = torch.cat([tokens.qkv[span] for (tokens, _), span in zip(scheduled, spans, strict=True)])
        batch = self.paged.make_batch([(tokens.request, n) for tokens, n in scheduled], copies)
        parts = (self.shape.num_heads, self.shape.num_kv_heads, self.shape.num_kv_heads)
        queries, keys, values = qkv.split_with_sizes(parts, dim=1)
        values = values if self.shape.latent_dim is None else keys[..., : self.shape.latent_dim]
        attended = self.backend.begin(batch).attend(0, (queries, keys, values), self.sinks, self.bias)
        return [part.clone() for part in attended.split([n for _, n in scheduled])]

    def run(self, tokens: Tokens, sizes: Sequence[int], others: Sequence[Tokens] = ()) -> torch.Tensor:
        """All outputs of a request that is computed in steps of these sizes (the last one repeats)."""
        outputs = []
        for index in range(len(tokens.qkv)):
            left = len(tokens.qkv) - tokens.request.num_computed_tokens
            if not left:
                break
            size = min(left, sizes[min(index, len(sizes) - 1)])
            busy = [(t, 1) for t in others if t.request.num_computed_tokens < len(t.qkv)]
            outputs.append(self.step([*busy[::2], (tokens, size), *busy[1::2]])[len(busy[::2])])
        return torch.cat(outputs)

    def expected(self, tokens: Tokens) -> torch.Tensor:
        return naive_attention(self.shape, tokens.qkv)


def naive_attention(shape: Shape, qkv: torch.Tensor) -> torch.Tensor:
    sinks, bias = sinks_of(shape), bias_of(shape)
    parts = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    queries, keys, values = qkv.double().split_with_sizes(parts, dim=1)
    values = values if shape.latent_dim is None else keys[..., : shape.latent_dim]
    if shape.cache_dtype == torch.int8:
        keys, values = map(rounded, (keys, values))
    keys, values = (part.repeat_interleave(shape.num_shared, 1) for part in (keys, values))
    positions = torch.arange(len(queries))
    distances = positions[:, None] - positions
    is_seen = (distances >= 0) & (distances < (shape.window or len(queries)))
    if shape.span:
        is_seen &= positions[:, None] // shape.span == positions // shape.span
    scores = torch.einsum("qhd,khd->hqk", queries, keys) * (shape.scale or shape.head_dim**-0.5)
    if shape.soft_cap:
        scores = shape.soft_cap * torch.tanh(scores / shape.soft_cap)
    if shape.has_slopes:
        scores -= torch.tensor(shape.spec.slopes)[:, None, None] * distances
    if bias is not None:
        scores += bias[:, bias.shape[1] // 2 - distances]
    maxima = scores.masked_fill(~is_seen, float("-inf")).amax(-1, keepdim=True)
    weights = (scores - maxima).exp() * is_seen
    sums = weights.sum(-1, keepdim=True)
    if sinks is not None:
        sums += (sinks[:, None, None] - maxima).exp()
    return torch.einsum("hqk,khd->qhd", weights / sums, values)


def rounded(heads: torch.Tensor) -> torch.Tensor:
    """What int8 with a scale for each head of a token keeps."""
    scales = heads.abs().amax(-1, keepdim=True) / 127
    return (heads / scales).round() * scales


@functools.cache
def expected_of(shape: Shape, num_tokens: int, seed: int) -> torch.Tensor:
    """The attention of `random_qkv` with these arguments, computed once for all instruction sets."""
    return naive_attention(shape, random_qkv(shape, num_tokens, seed))


def is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two outputs are equal bit for bit."""
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


SHAPES = [
    Shape(),
    Shape(1, 1, 32, 16),
    Shape(2, 8, 32, 32),
    Shape(3, 3, 96, 48, 100),
    Shape(1, 5, 128, 64),
    Shape(2, 2, 128, 32, 7),
    Shape(2, 4, 256, 16, 300),
    Shape(2, 1, 64, 64, 1),
    Shape(2, 2, 64, 16, scale=0.3),
    Shape(1, 40, 32, 32),
    Shape(1, 7, 160, 256),
    Shape(1, 6, 224, 272, 290),
    Shape(1, 16, 576, 16, latent_dim=512),
    Shape(1, 40, 288, 32, scale=0.1, latent_dim=256),
    Shape(1, 130, 96, 48, latent_dim=64),
    Shape(1, 2, 512, 32),
    Shape(2, 2, 64, 32, 90, soft_cap=0.7, scale=2e3),
    Shape(1, 5, 96, 48, has_slopes=True),
    Shape(2, 4, 64, 16, 130, has_sinks=True),
    Shape(2, 2, 64, 16, span=7),
    Shape(1, 3, 128, 64, span=256, has_sinks=True),
    Shape(cache_dtype=torch.int8),
    Shape(8, 2, 128, 32, cache_dtype=torch.int8),
    Shape(1, 40, 96, 48, 100, has_slopes=True, has_sinks=True, cache_dtype=torch.int8),
    Shape(2, 1, 256, 64, soft_cap=5.0, cache_dtype=torch.int8),
    Shape(4, 1, 32, 32, scale=0.2, has_bias=True),
    Shape(2, 3, 64, 16, 130, has_bias=True, has_sinks=True),
    Shape(2, 2, 96, 48, has_bias=True, soft_cap=5.0, cache_dtype=torch.int8),
]


def random_shape(seed: int) -> Shape:
    chance = random.Random(seed)
    return Shape(
        num_kv_heads=chance.randint(1, 3),
        num_shared=chance.randint(1, 8),
        head_dim=chance.randrange(32, 257, 32),
        block_size=16 * chance.randint(1, 20),
        window=chance.choice((None, chance.randint(1, 400))),
    )


@pytest.mark.parametrize("shape", [*SHAPES, *map(random_shape, range(8))], ids=str)
def test_mixed_steps_equal_naive_attention(library: NativeLibrary, shape: Shape) -> None:
    chance = random.Random(str(shape))
    harness = Harness(library, shape)
    # One token; less than a unit, a whole block, one more than a chunk of the kernel, several chunks. The two
    # largest latents do without the last, which took most of their time, and which latents of 16 heads have.
    lengths = (1, 5, 64, 257, 520)[: 4 if shape.num_heads * shape.head_dim > 10_000 else 5]
    requests = [harness.add(n, seed) for seed, n in enumerate(lengths)]
    outputs: list[list[torch.Tensor]] = [[] for _ in requests]
    while any(t.request.num_computed_tokens < len(t.qkv) for t in requests):
        lefts = [len(t.qkv) - t.request.num_computed_tokens for t in requests]
        picked = [i for i, left in enumerate(lefts) if left and chance.random() < 0.8]
        if not picked:
            continue
        sizes = [min(lefts[i], chance.choice((1, 1, 3, 17, 130, 400))) for i in picked]
        parts = harness.step([(requests[i], size) for i, size in zip(picked, sizes, strict=True)])
        for i, part in zip(picked, parts, strict=True):
            outputs[i].append(part)
    for seed, (tokens, parts) in enumerate(zip(requests, outputs, strict=True)):
        expected = expected_of(shape, len(tokens.qkv), seed)
        torch.testing.assert_close(torch.cat(parts).double(), expected, atol=TOLERANCE, rtol=TOLERANCE)


INVARIANCE_SHAPES = [
    Shape(),
    Shape(num_shared=1, head_dim=32, block_size=32),
    Shape(1, 8, 128, 32),
    Shape(block_size=48, window=90),
    Shape(1, 4, 96, 32, latent_dim=64),
    Shape(span=140, soft_cap=2.0, has_slopes=True, has_sinks=True),
    Shape(1, 8, 128, 32, cache_dtype=torch.int8),
    Shape(block_size=48, window=90, cache_dtype=torch.int8),
    Shape(2, 1, 32, 32, has_bias=True),
]


@pytest.mark.parametrize("shape", INVARIANCE_SHAPES, ids=str)
def test_how_a_prompt_is_cut_changes_no_bit(library: NativeLibrary, shape: Shape) -> None:
    whole = Harness(library, shape)
    outputs = whole.run(whole.add(270, 0), (270,))
    for sizes in ((7, 100, 1, 33, 150), (250, 1), (64,)):
        cut = Harness(library, shape, garbage=0.0, seed=1)
        assert is_same(outputs, cut.run(cut.add(270, 0), sizes))


@pytest.mark.parametrize("shape", [Shape(), Shape(4, 1, 32, 32, cache_dtype=torch.int8), Shape(1, 4, block_size=32)])
def test_what_is_written_first_is_read_later(library: NativeLibrary, shape: Shape) -> None:
    """As by a decoder whose tokens each read all of an input, and an encoder that reads nothing."""
    whole, parted = Harness(library, shape), Harness(library, shape)
    num_tokens = 300
    tokens, expected = parted.add(num_tokens, 0), whole.run(whole.add(num_tokens, 0), (num_tokens,))
    parts = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    queries, keys, values = tokens.qkv.split_with_sizes(parts, dim=1)
    writing = parted.backend.begin(parted.paged.make_batch([(tokens.request, num_tokens)]))
    writing.write(0, keys, values)
    for chosen in (range(num_tokens - 1, num_tokens), range(0, num_tokens, 7)):
        readers = [dataclasses.replace(tokens.request, num_computed_tokens=position) for position in chosen]
        reading = parted.backend.begin(parted.paged.make_batch([(reader, 1) for reader in readers]))
        assert is_same(reading.read(0, queries[chosen.start :: chosen.step]), expected[chosen.start :: chosen.step])


def test_token_by_token_changes_no_bit(library: NativeLibrary) -> None:
    whole, cut = Harness(library, Shape()), Harness(library, Shape(), seed=1)
    assert is_same(whole.run(whole.add(260, 0), (260,)), cut.run(cut.add(260, 0), (1,)))


def test_few_tokens_at_once_are_merged_as_many_are(library: NativeLibrary) -> None:
    """In one value of some 100,000 the last bit of a step of 16 tokens was not that of a step of 17.

    The compiler had fused another multiplication with the addition where chunks are merged. Greedy answers changed
    when drafts were verified.
    """
    shape = Shape(num_kv_heads=8, num_shared=2, head_dim=128, block_size=32)
    few, many = Harness(library, shape), Harness(library, shape)
    assert is_same(few.run(few.add(1100, 0), (260, 16)), many.run(many.add(1100, 0), (260, 17)))


@pytest.mark.parametrize("shape", INVARIANCE_SHAPES, ids=str)
def test_neighbours_change_no_bit(library: NativeLibrary, shape: Shape) -> None:
    alone, among = Harness(library, shape), Harness(library, shape)
    others = [among.add(20 + index, index + 1) for index in range(16)]
    sizes = (100, 150, 1, 3, 1)
    assert is_same(alone.run(alone.add(280, 0), sizes), among.run(among.add(280, 0), sizes, others))


@pytest.mark.parametrize("shape", INVARIANCE_SHAPES, ids=str)
def test_the_number_of_threads_changes_no_bit(library: NativeLibrary, shape: Shape) -> None:
    outputs = []
    for num_threads in (1, 2, 3):
        library.set_num_threads(num_threads)
        harness = Harness(library, shape)
        outputs.append(harness.run(harness.add(300, 0), (150, 1, 1, 100, 1)))
    assert all(is_same(outputs[0], other) for other in outputs[1:])


@pytest.mark.parametrize("garbage", [float("nan"), float("inf")])
@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_what_others_left_in_a_block_changes_no_bit(
    library: NativeLibrary, dtype: torch.dtype, block_size: int, garbage: float
) -> None:
    shape = Shape(block_size=block_size, cache_dtype=dtype)
    clean, dirty = (Harness(library, shape, value) for value in (0.0, garbage))
    # Odd lengths: the pair of tokens at the end of the values is half stale.
    for num_tokens in (1, 15, 33, 49, 259):
        outputs = [h.run(h.add(num_tokens, num_tokens), (max(1, num_tokens - 2), 1)) for h in (clean, dirty)]
        assert is_same(*outputs)
    assert not dirty.blocks[0].any(), "the null block stays zero"


@pytest.mark.parametrize("fault", [float("nan"), float("inf")])
def test_int8_hides_no_value_that_is_not_finite(library: NativeLibrary, fault: float) -> None:
    """A maximum of 16 bits at a time lost NaN, which became 0: later tokens got plausible results."""
    for side in (-1, -2):  # a value and a key of the second head
        harness = Harness(library, Shape(cache_dtype=torch.int8))
        tokens = harness.add(6, 0)
        tokens.qkv[3, side * 2 + 1, 5] = fault
        outputs = harness.run(tokens, (1,)).isnan().flatten(2).any(2)
        assert outputs.tolist() == [[False] * 4] * 3 + [[False, False, True, True]] * 3


def share(owner: Tokens, other: Tokens, num_tokens: int, block_size: int) -> None:
    """Make the first tokens of `other` those of `owner`, in the same blocks; they count as computed."""
    other.qkv[:num_tokens] = owner.qkv[:num_tokens]
    other.request.tables[0][: num_tokens // block_size] = owner.request.tables[0][: num_tokens // block_size]
    other.request.num_computed_tokens = num_tokens


@pytest.mark.parametrize(("num_requests", "block_size", "num_shared"), [(3, 16, 512), (5, 32, 512), (4, 16, 400)])
def test_a_shared_prefix_is_read_once_and_changes_no_bit(
    library: NativeLibrary, num_requests: int, block_size: int, num_shared: int
) -> None:
    harness = Harness(library, Shape(block_size=block_size))
    requests = [harness.add(530 + index, index) for index in range(num_requests)]
    harness.step([(requests[0], num_shared)])
    for other in requests[1:]:
        share(requests[0], other, num_shared, block_size)
    harness.step([(tokens, len(tokens.qkv) - num_shared - 1) for tokens in requests])
    decodes = [(tokens, 1) for tokens in requests]
    for tokens, outputs in zip(requests, harness.step(decodes), strict=True):
        lone = Harness(library, Shape(block_size=block_size))
        copy = lone.add(len(tokens.qkv), 0)
        copy.qkv.copy_(tokens.qkv)
        whole = lone.run(copy, (len(copy.qkv),))
        assert is_same(outputs, whole[-1:])
    for tokens in requests:
        tokens.request.num_computed_tokens -= 1
    batch = harness.paged.make_batch([(tokens.request, 1) for tokens in requests])
    plan = harness.backend.plan(batch, 0, harness.shape.num_heads)[0]
    num_whole = num_shared // 256
    assert plan.num_items == num_whole + (3 - num_whole) * num_requests, "whole chunks once for all"


@pytest.mark.parametrize(("num_requests", "is_split"), [(2, True), (14, False)])
def test_parts_are_kept_only_while_they_fit(library: NativeLibrary, num_requests: int, is_split: bool) -> None:
    """A part of 40 heads of 256 values takes 43 kB, so 128 MB hold 3,084 parts."""
    shape = Shape(1, 40, 256, 272)
    harness = Harness(library, shape)
    owner = harness.paged.add(np.zeros(60_000, np.int64))
    owner.num_computed_tokens = 59_999
    batch = harness.paged.make_batch([(dataclasses.replace(owner), 1) for _ in range(num_requests)])
    plan = harness.backend.plan(batch, 0, shape.num_heads)[0]
    num_chunks = -(-60_000 // 256)
    assert plan.num_items == (num_chunks if is_split else num_requests)


def test_equal_blocks_that_are_filled_differently_are_not_shared(library: NativeLibrary) -> None:
    """A leader that still writes a block, and a follower that sees only the part of it that came before."""
    harness = Harness(library, Shape(block_size=64))
    leader, follower = harness.add(64, 0), harness.add(40, 0)
    follower.qkv.copy_(leader.qkv[:40])
    harness.step([(leader, 39)])
    follower.request.tables[0][0] = leader.request.tables[0][0]
    follower.request.num_computed_tokens = 39
    ahead, behind = harness.step([(leader, 10), (follower, 1)])
    assert is_same(ahead[:1], behind)


def test_blocks_are_copied_before_the_step_writes(library: NativeLibrary) -> None:
    harness = Harness(library, Shape(block_size=16))
    original, fork = harness.add(29, 0), harness.add(29, 1)
    harness.step([(original, 28)])
    share(original, fork, 16, 16)
    fork.qkv[:28] = original.qkv[:28]
    fork.request.num_computed_tokens = 28
    copies = np.array([[original.request.tables[0][1], fork.request.tables[0][1]]])
    for tokens, outputs in zip((original, fork), harness.step([(original, 1), (fork, 1)], copies), strict=True):
        expected = harness.expected(tokens)[28:]
        torch.testing.assert_close(outputs.double(), expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_memory_is_asked_for_with_every_step(library: NativeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[tuple[int, float]] = []
    monkeypatch.setattr(FirstTouch, "approach", lambda touch, item, num_items: steps.append((item, num_items)))
    harness = Harness(library, Shape(block_size=16))
    tokens = harness.add(41, 0)
    harness.step([(tokens, 40)])
    harness.step([(tokens, 1)])
    blocks = tokens.request.tables[0]  # in no order
    assert steps == [(max(blocks), 40 / 16), (blocks[2], 1 / 16)]


def test_idle_time_goes_to_memory_for_tokens_to_come(library: NativeLibrary) -> None:
    groups = (CacheGroup(PagedKV(2, 64), (0, 1)),)
    backend = NativeBackend(groups, 4096, 16, torch.bfloat16, CPU, library)
    num_calls = 0
    while backend.prepare():
        num_calls += 1
    bytes_of_a_token = 2 * 2 * 64 * 2
    assert num_calls == 2 * 8192 * bytes_of_a_token // (2 << 20), "pages of two layers for four steps of 2,048 tokens"
    assert not any(cache.any() for cache in backend._caches.values())


def test_groups_of_layers_keep_their_own_blocks(library: NativeLibrary) -> None:
    windows = (None, 20)
    groups = tuple(CacheGroup(PagedKV(2, 64, window), (layer,)) for layer, window in enumerate(windows))
    backend = NativeBackend(groups, NUM_BLOCKS, 16, torch.bfloat16, CPU, library)
    paged = PagedRequests(NUM_BLOCKS, 16, windows)
    request = paged.add(np.zeros(90, np.int64))
    single = [Harness(library, Shape(window=window)) for window in windows]
    tokens = [harness.add(90, 0) for harness in single]
    for count in (60, 1, 29):
        start = request.num_computed_tokens
        step = backend.begin(paged.make_batch([(request, count)]))
        for layer, harness in enumerate(single):
            q, k, v = tokens[layer].qkv[start : start + count].split_with_sizes((4, 2, 2), dim=1)
            attended = step.attend(layer, (q, k, v)).clone()
            assert is_same(attended, harness.step([(tokens[layer], count)])[0])


def test_what_the_kernels_can_serve() -> None:
    def can_serve(
        head_dim: int = 64,
        block_size: int = 16,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device = CPU,
        cache_dtype: torch.dtype | None = None,
        latent_dim: int | None = None,
    ) -> bool:
        groups = (CacheGroup(PagedKV(2, head_dim, latent_dim=latent_dim), (0,)),)
        return supports(groups, block_size, dtype, device, cache_dtype or dtype)

    assert can_serve() and can_serve(head_dim=96) and can_serve(block_size=48)
    assert not can_serve(head_dim=80) and not can_serve(head_dim=672)
    assert not can_serve(block_size=8)
    assert not can_serve(dtype=torch.float32)
    assert not can_serve(device=torch.device("cuda"))
    assert can_serve(cache_dtype=torch.int8) and not can_serve(cache_dtype=torch.float8_e4m3fn)
    assert can_serve(latent_dim=32) and not can_serve(latent_dim=32, cache_dtype=torch.int8)
