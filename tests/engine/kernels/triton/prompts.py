"""Prompts over a paged cache for tests of the libraries that attend to them, and the attention that is expected."""

from dataclasses import dataclass, field

import numpy as np
import torch

from tests.engine.paged import PagedRequests
from weft.engine.cache.specs import PagedKV
from weft.engine.kernels.triton.prompts import PromptAttention, PromptLayers, Prompts, find_prompts

HOPPER = 9, 0


def attend_to_one(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, window_left: int, soft_cap: float
) -> torch.Tensor:
    """Attention of the last tokens of one request to all of its tokens, causal; window_left -1 and soft_cap 0 are none.

    Args:
        queries: (num_queries, num_heads, head_dim).
        keys: (num_keys, num_kv_heads, head_dim).
        values: (num_keys, num_kv_heads, head_dim).
    """
    num_shared = queries.shape[1] // keys.shape[1]
    keys, values = (part.double().repeat_interleave(num_shared, 1) for part in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", queries.double(), keys) * scale
    if soft_cap > 0:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    at = torch.arange(len(keys))
    distances = at[len(keys) - len(queries) :, None] - at
    is_seen = (distances >= 0) & ((distances <= window_left) | (window_left < 0))
    weights = scores.masked_fill(~is_seen, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values).to(queries.dtype)


@dataclass
class PromptCase:
    """Requests of which some tokens are in the cache, and of which a step computes more.

    Attributes:
        lengths: Computed tokens of each request, and those of the step.
    """

    spec: PagedKV
    lengths: list[tuple[int, int]]
    block_size: int = 16
    num_heads: int = 4
    dtype: torch.dtype = torch.float16
    parts: list[list[torch.Tensor]] = field(default_factory=list)

    @property
    def layers(self) -> PromptLayers:
        return PromptLayers(self.spec, self.num_heads, self.dtype, self.dtype, self.block_size, HOPPER)

    def find(self, seed: int = 0) -> tuple[Prompts, torch.Tensor]:
        """The prompts of the step, and a cache with K/V of all requests and not-a-numbers behind them."""
        generator = torch.Generator().manual_seed(seed)
        num_blocks = 2 + sum(-(-sum(counts) // self.block_size) for counts in self.lengths)
        paged = PagedRequests(num_blocks, self.block_size, (self.spec.sliding_window,), seed)
        shape = (num_blocks, 2, self.spec.num_kv_heads, self.block_size, self.spec.head_dim)
        cache = torch.full(shape, float("nan"), dtype=self.dtype)
        cache[0] = 0
        scheduled = []
        for computed, count in self.lengths:
            request = paged.add(np.zeros(computed + count, np.int64))
            heads = self.num_heads, self.spec.num_kv_heads, self.spec.num_kv_heads
            qkv = torch.randn(computed + count, sum(heads), self.spec.head_dim, generator=generator).to(self.dtype)
            queries, keys, values = qkv.split_with_sizes(heads, dim=1)
            blocks, places = np.divmod(np.arange(computed + count), self.block_size)
            cache[request.tables[0][blocks], :, :, places] = torch.stack((keys, values), 1)
            self.parts.append([queries, keys, values])
            request.num_computed_tokens = computed
            scheduled.append((request, count))
        batch = paged.make_batch(scheduled)
        prompts = find_prompts(batch, batch.groups[0])
        assert prompts
        return prompts, cache

    def step_parts(self, at: slice) -> list[torch.Tensor]:
        """Queries, keys and values of a range of the step's tokens, as slices of one tensor."""
        of_step = [
            [part[computed:] for part in parts] for parts, (computed, _) in zip(self.parts, self.lengths, strict=True)
        ]
        sizes = [part.shape[1] for part in self.parts[0]]
        qkv = torch.cat([torch.cat(parts, 1) for parts in of_step])
        return [part[at] for part in qkv.split_with_sizes(sizes, dim=1)]

    def expected(self, *, prompts_alone: bool) -> torch.Tensor:
        """Attention of the step's tokens, from the first prompt to the last; decodes between them if they count."""
        window_left, soft_cap = (self.spec.sliding_window or 0) - 1, self.spec.soft_cap or 0.0
        rows = []
        for (queries, keys, values), (computed, count) in zip(self.parts, self.lengths, strict=True):
            attended = attend_to_one(queries[computed:], keys, values, self.spec.score_scale, window_left, soft_cap)
            rows.append(attended if count > 1 or not prompts_alone else torch.full_like(attended, float("nan")))
        firsts = [index for index, (_, count) in enumerate(self.lengths) if count > 1]
        return torch.cat(rows[firsts[0] : firsts[-1] + 1])


def check(library: PromptAttention, case: PromptCase) -> None:
    """Compare what a library computes of a step with what is expected."""
    assert library.supports(case.layers)
    prompts, cache = case.find()
    step = library.begin(prompts, case.layers)
    assert step
    starts = torch.from_numpy(step.starts.astype(np.int32))
    attended = step.attend(*case.step_parts(step.tokens), cache, starts)
    expected = case.expected(prompts_alone=prompts.are_fresh)
    is_prompt = ~expected.isnan()
    torch.testing.assert_close(attended[is_prompt], expected[is_prompt], atol=4e-3, rtol=4e-3)
    assert attended.shape == expected.shape


FRESH = [
    PromptCase(PagedKV(2, 64), [(0, 30), (17, 1), (0, 12)]),
    PromptCase(PagedKV(2, 64), [(9, 1), (0, 40)], block_size=32),
]
CONTINUED = [
    PromptCase(PagedKV(2, 64), [(5, 1), (40, 130), (7, 1), (0, 20), (3, 1)]),
    PromptCase(PagedKV(1, 128), [(64, 144)], block_size=32),
    PromptCase(PagedKV(2, 64, sliding_window=50), [(200, 130), (0, 64)]),
    PromptCase(PagedKV(4, 64, scale=0.3, soft_cap=2.0), [(33, 129)]),
]
