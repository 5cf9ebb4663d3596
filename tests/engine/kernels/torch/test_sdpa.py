"""sdpa.py against attention written out in float64."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.paged import PagedRequest, PagedRequests
from weft.engine.cache.specs import CacheGroup, PagedKV
from weft.engine.kernels.torch.sdpa import SdpaBackend

NUM_BLOCKS = 200
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


class Harness:
    """One layer's attention over a paged cache, and the queries, keys and values of every token of each request."""

    def __init__(
        self,
        *,
        window: int | None = None,
        scale: float | None = None,
        soft_cap: float | None = None,
        span: int | None = None,
        slopes: tuple[float, ...] = (),
        sinks: tuple[float, ...] = (),
        num_heads: int = 4,
        num_kv_heads: int = 2,
        block_size: int = 8,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        garbage: float = float("nan"),
        latent_dim: int | None = None,
    ) -> None:
        self.window, self.scale, self.soft_cap, self.latent_dim = window, scale, soft_cap, latent_dim
        self.span, self.slopes = span, slopes
        self.sinks = torch.tensor(sinks, device=device) if sinks else None
        self.dtype, self.device = dtype, torch.device(device)
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, 16
        kind = (window, scale, soft_cap, latent_dim, span, slopes, bool(sinks))
        spec = PagedKV(num_kv_heads, self.head_dim, *kind)
        self.backend = SdpaBackend((CacheGroup(spec, (0,)),), NUM_BLOCKS, block_size, dtype, self.device)
        # What other requests left behind must not matter, whatever it is.
        for cache in (self.backend._keys[0], self.backend._values[0]):
            cache[block_size:] = garbage
        self.paged = PagedRequests(NUM_BLOCKS, block_size, (spec,))
        self.generator = torch.Generator().manual_seed(0)
        self.inputs: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def add(self, num_tokens: int) -> PagedRequest:
        request = self.paged.add(np.zeros(num_tokens, np.int64))
        queries, keys = self._random(num_tokens, self.num_heads), self._random(num_tokens, self.num_kv_heads)
        values = (
            self._random(num_tokens, self.num_kv_heads) if self.latent_dim is None else keys[..., : self.latent_dim]
        )
        self.inputs[id(request)] = queries, keys, values
        return request

    def step(self, scheduled: list[tuple[PagedRequest, int]], copies: np.ndarray | None = None) -> list[torch.Tensor]:
        """Compute the next n tokens of each request; returns the attention output of each."""
        spans = [slice(r.num_computed_tokens, r.num_computed_tokens + count) for r, count in scheduled]
        batch = self.paged.make_batch(scheduled, *([] if copies is None else [copies]))
        queries, keys, values = (
            torch.cat([self.inputs[id(r)][part][span] for (r, _), span in zip(scheduled, spans, strict=True)])
            for part in range(3)
        )
        with torch.inference_mode():
            attended = self.backend.begin(batch).attend(0, (queries, keys, values), self.sinks)
        return list(torch.split(attended, [count for _, count in scheduled]))

    def expected(self, request: PagedRequest) -> torch.Tensor:
        """The attention output of every token of the request, (num_tokens, num_heads, head_dim)."""
        queries, keys, values = (part.double().cpu() for part in self.inputs[id(request)])
        keys, values = (part.repeat_interleave(self.num_heads // self.num_kv_heads, 1) for part in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * (self.scale or self.head_dim**-0.5)
        if self.soft_cap is not None:
            scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
        positions = torch.arange(len(queries))
        distances = positions[:, None] - positions
        is_seen = distances >= 0
        if self.window is not None:
            is_seen &= distances < self.window
        if self.span is not None:
            is_seen &= positions[:, None] // self.span == positions // self.span
        if self.slopes:
            scores -= torch.tensor(self.slopes)[:, None, None] * distances
        weights = scores.exp() * is_seen  # (num_heads, q, k)
        sums = weights.sum(-1, keepdim=True)
        if self.sinks is not None:
            sums += self.sinks.double().cpu().exp()[:, None, None]
        return torch.einsum("hqk,khd->qhd", weights / sums, values)

    def check(self, request: PagedRequest, attended: torch.Tensor) -> None:
        """Compare with the last tokens that were computed."""
        stop = request.num_computed_tokens
        expected = self.expected(request)[stop - len(attended) : stop]
        tolerance = TOLERANCES[self.dtype]
        torch.testing.assert_close(attended.double().cpu(), expected, atol=tolerance, rtol=tolerance)

    def _random(self, num_tokens: int, num_heads: int) -> torch.Tensor:
        values = torch.randn(num_tokens, num_heads, self.head_dim, generator=self.generator)
        return values.to(self.device, self.dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 1, 5, 8, 40])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 2), (3, 3), (4, 1)])
def test_mixed_steps_equal_naive_attention(
    device: str, dtype: torch.dtype, window: int | None, num_heads: int, num_kv_heads: int
) -> None:
    check_mixed_steps(
        Harness(device=device, dtype=dtype, window=window, num_heads=num_heads, num_kv_heads=num_kv_heads)
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 2), (3, 3)])
@pytest.mark.parametrize(("scale", "soft_cap"), [(0.1, None), (None, 1.5), (0.4, 0.7), (2e3, 3.0)])
def test_scales_and_soft_caps_equal_naive_attention(
    device: str,
    dtype: torch.dtype,
    window: int | None,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    soft_cap: float | None,
) -> None:
    check_mixed_steps(
        Harness(
            device=device,
            dtype=dtype,
            window=window,
            scale=scale,
            soft_cap=soft_cap,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
        )
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "harness",
    [
        {"span": 8},
        {"span": 20, "soft_cap": 1.5},
        {"slopes": (0.5, 0.25, 0.125, 0.01)},
        {"slopes": (0.5, 0.1), "num_heads": 2, "num_kv_heads": 2, "window": 9},
        {"sinks": (-2.0, 0.0, 3.0, 30.0)},
        {"sinks": (0.3, 1.0, 2.0, -9.0), "window": 5, "num_kv_heads": 1},
    ],
    ids=str,
)
def test_spans_slopes_and_sinks_equal_naive_attention(device: str, harness: dict[str, Any]) -> None:
    check_mixed_steps(Harness(device=device, **harness))


def check_mixed_steps(harness: Harness) -> None:
    long, short, late = harness.add(90), harness.add(12), harness.add(33)
    for scheduled in (
        [(long, 61)],
        [(long, 1), (short, 7)],
        [(long, 1), (short, 1), (late, 20)],
        [(short, 3), (long, 17), (late, 1)],
        [(long, 1), (late, 12), (short, 1)],
    ):
        for (request, _), attended in zip(scheduled, harness.step(scheduled), strict=True):
            harness.check(request, attended)


@pytest.mark.parametrize("device", DEVICES)
def test_latents_are_keys_whose_first_values_are_the_values(device: str) -> None:
    check_mixed_steps(Harness(device=device, num_kv_heads=1, latent_dim=12))


@pytest.mark.parametrize("soft_cap", [None, 1.0])
@pytest.mark.parametrize("window", [None, 300, 700])
def test_long_chunks_run_in_blocks_of_queries(window: int | None, soft_cap: float | None) -> None:
    harness = Harness(window=window, soft_cap=soft_cap)
    request = harness.add(1500)
    for count in (600, 900):
        (attended,) = harness.step([(request, count)])
        harness.check(request, attended)


@pytest.mark.parametrize("window", [None, 30])
def test_decodes_of_unlike_contexts(window: int | None) -> None:
    harness = Harness(window=window)
    requests = [harness.add(num_tokens) for num_tokens in (1, 300, 9, 120, 2, 118, 121, 250)]
    harness.step([(request, len(request.token_ids) - 1) for request in requests if len(request.token_ids) > 1])
    attended = harness.step([(request, 1) for request in requests])
    for request, rows in zip(requests, attended, strict=True):
        harness.check(request, rows)


def test_the_rest_of_the_batch_changes_a_result_by_rounding_only() -> None:
    alone, together = Harness(), Harness()
    outputs = []
    for harness, others in ((alone, ()), (together, (90, 64, 3))):
        request = harness.add(80)
        neighbours = [harness.add(num_tokens) for num_tokens in others]
        harness.step([(request, 79)] + [(neighbour, len(neighbour.token_ids) - 1) for neighbour in neighbours])
        outputs.append(harness.step([(request, 1)] + [(neighbour, 1) for neighbour in neighbours])[0])
    torch.testing.assert_close(outputs[0], outputs[1], atol=1e-6, rtol=1e-6)


def test_blocks_are_copied_before_the_step_writes() -> None:
    harness = Harness(block_size=8)
    original, fork = harness.add(13), harness.add(13)
    queries, keys, values = (
        torch.cat((theirs[:12], own[12:]))
        for theirs, own in zip(harness.inputs[id(original)], harness.inputs[id(fork)], strict=True)
    )
    harness.inputs[id(fork)] = queries, keys, values
    harness.step([(original, 12)])
    # The fork shares the full block and copies the one that both write to.
    fork.tables[0][0] = original.tables[0][0]
    fork.num_computed_tokens = 12
    copies = np.array([[original.tables[0][1], fork.tables[0][1]]])
    for request, attended in zip((original, fork), harness.step([(original, 1), (fork, 1)], copies), strict=True):
        harness.check(request, attended)


@pytest.mark.parametrize("latent_dim", [None, 12])
def test_a_block_is_copied_before_it_is_copied_to(latent_dim: int | None) -> None:
    """Blocks of latents were copied twice, once as keys and once as values, so that a chain of copies went too far."""
    harness = Harness(block_size=8, num_kv_heads=1, latent_dim=latent_dim)
    first, second, third = (harness.add(6) for _ in range(3))
    harness.step([(first, 5), (second, 5), (third, 1)])
    for source, target in ((second, third), (first, second)):
        last = harness.inputs[id(target)]
        pairs = zip(harness.inputs[id(source)], last, strict=True)
        harness.inputs[id(target)] = tuple(torch.cat((theirs[:5], own[5:])) for theirs, own in pairs)  # type: ignore
        target.num_computed_tokens = 5
    copies = np.array([[a.tables[0][0], b.tables[0][0]] for a, b in ((second, third), (first, second))])
    for request, attended in zip((second, third), harness.step([(second, 1), (third, 1)], copies), strict=True):
        harness.check(request, attended)
