"""mutual_step.py over the backends of a CPU, against attention in float64; Triton's: attention_parity.py."""

import numpy as np
import pytest
import torch

from tests.engine.paged import PagedRequests
from weft.engine.batch import Batch
from weft.engine.batch_inputs import PictureTokens
from weft.engine.cache.specs import CacheGroup, PagedKV
from weft.engine.kernels.cpu import library
from weft.engine.kernels.cpu.attention import NativeBackend
from weft.engine.kernels.torch.caches import Caches
from weft.engine.kernels.torch.mutual_step import MutualCaches
from weft.engine.kernels.torch.sdpa import SdpaBackend
from weft.engine.layers.block import AttentionBackend

CPU = torch.device("cpu")
BLOCK_SIZE, NUM_BLOCKS = 16, 40
BACKENDS = {"torch": (torch.float32, 1e-5), "native": (torch.bfloat16, 2e-2), "native, rounded": (torch.int8, 8e-2)}


def made(name: str, groups: tuple[CacheGroup[PagedKV], ...]) -> AttentionBackend:
    sizes = groups, NUM_BLOCKS, BLOCK_SIZE
    if name == "torch":
        return SdpaBackend(*sizes, torch.float32, CPU)
    native = library.load()
    if native is None:
        pytest.skip("Weft's native kernels are not compiled")
    return NativeBackend(*sizes, torch.bfloat16, CPU, native, BACKENDS[name][0])


def expected(qkv: torch.Tensor, window: int | None, picture: range) -> torch.Tensor:
    """Of every token of a request, with 4 heads of queries and 2 of keys."""
    queries, keys, values = qkv.double().split((4, 2, 2), 1)
    at = torch.arange(len(qkv))
    is_inside = (at >= picture.start) & (at < picture.stop)
    is_seen = ((at <= at[:, None]) | (is_inside & is_inside[:, None])) & (at > at[:, None] - (window or len(at)))
    scores = torch.einsum("qhd,khd->hqk", queries, keys.repeat_interleave(2, 1)) * qkv.shape[-1] ** -0.5
    weights = scores.masked_fill(~is_seen, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(2, 1))


def seen(batch: Batch, *targets: range) -> Batch:
    pictures = (PictureTokens(b"", np.array(each), 0) for each in targets)
    return Batch(**{name: getattr(batch, name) for name in Batch.__slots__} | {"pictures": tuple(pictures)})


@pytest.mark.parametrize("window", [None, 9, 40])
@pytest.mark.parametrize("name", BACKENDS)
def test_tokens_of_a_picture_see_each_other(name: str, window: int | None) -> None:
    """The first 30 tokens of one request are cached, 10 of them of its picture; another layer sees only back."""
    specs = PagedKV(2, 32, window, num_mutual=99), PagedKV(2, 32, window)
    groups = tuple(CacheGroup(spec, (layer,)) for layer, spec in enumerate(specs))
    backend, paged = made(name, groups), PagedRequests(NUM_BLOCKS, BLOCK_SIZE, specs)
    caches = Caches(backend, mutual=MutualCaches(frozenset({0}), CPU))
    first, second = (paged.add(np.zeros(length, np.int64)) for length in (100, 60))
    dtype = torch.float32 if name == "torch" else torch.bfloat16
    qkv = [
        torch.randn(length, 8, 32, generator=torch.Generator().manual_seed(length)).to(dtype) for length in (100, 60)
    ]
    tolerance = BACKENDS[name][1]
    steps = [
        ([(first, 20)], qkv[0][:20], ()),
        ([(first, 60)], qkv[0][20:80], (range(60),)),
        ([(first, 20), (second, 60)], torch.cat((qkv[0][80:], qkv[1])), (range(25, 45), range(46, 50), range(0))),
    ]
    found: list[list[torch.Tensor]] = [[], []]
    for scheduled, part, pictures in steps:
        step = caches.begin(seen(paged.make_batch(scheduled), *pictures)).attention
        for layer in (0, 1):
            found[layer].append(step.attend(layer, part.split((4, 2, 2), 1)).clone())  # type: ignore[arg-type]
    for layer, is_mutual in ((0, True), (1, False)):
        rows = torch.cat(found[layer]).double()
        wanted = [expected(qkv[0], window, range(20, 80) if is_mutual else range(0))]
        if is_mutual:
            both = expected(qkv[1], window, range(5, 25))
            both[26:30] = expected(qkv[1], window, range(26, 30))[26:30]
            wanted.append(both)
        else:
            wanted.append(expected(qkv[1], window, range(0)))
        torch.testing.assert_close(rows, torch.cat(wanted), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", BACKENDS)
def test_the_first_tokens_of_a_picture_may_be_cached(name: str) -> None:
    """Another request has computed them; the rest sees the whole."""
    spec = PagedKV(2, 32, 25, num_mutual=99)
    backend, paged = made(name, (CacheGroup(spec, (0,)),)), PagedRequests(NUM_BLOCKS, BLOCK_SIZE, (spec,))
    caches = Caches(backend, mutual=MutualCaches(frozenset({0}), CPU))
    dtype = torch.float32 if name == "torch" else torch.bfloat16
    qkv = torch.randn(70, 8, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    request = paged.add(np.zeros(70, np.int64))
    begin = caches.begin(seen(paged.make_batch([(request, 70)]), range(20, 60))).attention
    begin.attend(0, qkv.split((4, 2, 2), 1))  # type: ignore[arg-type]
    request.num_computed_tokens = 32
    again = caches.begin(seen(paged.make_batch([(request, 38)]), range(28))).attention
    found = again.attend(0, qkv[32:].split((4, 2, 2), 1)).double()  # type: ignore[arg-type]
    tolerance = BACKENDS[name][1]
    torch.testing.assert_close(found, expected(qkv, 25, range(20, 60))[32:], atol=tolerance, rtol=tolerance)
