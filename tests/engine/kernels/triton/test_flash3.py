"""FlashAttention 3 by a stand-in for its package, which checks arguments as the real one does and computes with torch.

The signatures are those of flash_attn_interface.py in github.com/Dao-AILab/flash-attention, folder hopper, commit
0251105 (August 2026, version 3.0.0), the checks those of flash_api.cpp there.
"""

import dataclasses
import sys
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.engine.kernels.triton import prompts
from weft.engine.cache.specs import PagedKV
from weft.engine.kernels.triton.prompts import FlashAttention3, PromptLayers


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    seqused_q: Any = None,
    seqused_k: Any = None,
    softmax_scale: Any = None,
    causal: Any = False,
    qv: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    window_size: Any = (-1, -1),
    attention_chunk: Any = 0,
    softcap: Any = 0.0,
    num_splits: Any = 1,
    pack_gqa: Any = None,
    deterministic: Any = False,
    sm_margin: Any = 0,
    return_attn_probs: Any = False,
) -> torch.Tensor:
    assert k.shape == v.shape == (len(q), k.shape[1], q.shape[2])
    assert all(part.stride(-1) == 1 for part in (q, k, v))
    assert causal
    starts = checked_starts(cu_seqlens_q, max_seqlen_q)
    assert starts == checked_starts(cu_seqlens_k, max_seqlen_k)
    rows = [
        prompts.attend_to_one(q[a:b], k[a:b], v[a:b], softmax_scale, window_size[0], softcap)
        for a, b in pairwise(starts)
    ]
    return torch.cat(rows)


def checked_starts(starts: torch.Tensor, longest: int) -> list[int]:
    assert starts.dtype == torch.int32
    assert starts.is_contiguous()
    assert longest == int(starts.diff().max())
    return starts.tolist()


def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    qv: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    page_table: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k_new: Any = None,
    max_seqlen_q: Any = None,
    rotary_seqlens: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    softmax_scale: Any = None,
    causal: Any = False,
    window_size: Any = (-1, -1),
    attention_chunk: Any = 0,
    softcap: Any = 0.0,
    rotary_interleaved: Any = True,
    scheduler_metadata: Any = None,
    num_splits: Any = 0,
    pack_gqa: Any = None,
    sm_margin: Any = 0,
    return_softmax_lse: Any = False,
) -> torch.Tensor:
    starts = checked_starts(cu_seqlens_q, max_seqlen_q)
    num_pages, page_size, num_kv_heads, _ = k_cache.shape
    assert v_cache.shape == (num_pages, page_size, num_kv_heads, q.shape[2])
    assert (q.stride(-1), k_cache.stride(-1), v_cache.stride(-1), page_table.stride(-1)) == (1, 1, 1, 1)
    assert cache_seqlens.dtype == page_table.dtype == torch.int32
    assert cache_seqlens.shape == page_table.shape[:1] == (len(starts) - 1,)
    assert causal
    rows = []
    for (a, b), num_keys, pages in zip(pairwise(starts), cache_seqlens.tolist(), page_table, strict=True):
        keys, values = (side[pages].flatten(0, 1)[:num_keys] for side in (k_cache, v_cache))
        rows.append(prompts.attend_to_one(q[a:b], keys, values, softmax_scale, window_size[0], softcap))
    return torch.cat(rows)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FlashAttention3:
    functions = {f.__name__: f for f in (flash_attn_varlen_func, flash_attn_with_kvcache)}
    monkeypatch.setitem(sys.modules, "flash_attn_interface", SimpleNamespace(**functions))
    return FlashAttention3(torch.device("cpu"))


FRESH = [
    *prompts.FRESH,
    prompts.PromptCase(PagedKV(2, 64, sliding_window=20, scale=0.2, soft_cap=3.0), [(0, 30), (0, 12)]),
]


@pytest.mark.parametrize("case", [*FRESH, *prompts.CONTINUED], ids=str)
def test_prompts(library: FlashAttention3, case: prompts.PromptCase) -> None:
    prompts.check(library, dataclasses.replace(case, parts=[]))


def test_what_it_computes(library: FlashAttention3) -> None:
    layers = PromptLayers(PagedKV(2, 80, 100, 0.1, 50.0), 8, torch.bfloat16, torch.bfloat16, 32, prompts.HOPPER)
    assert library.supports(layers)
    for change in (
        {"dtype": torch.float32, "cache_dtype": torch.float32},
        {"cache_dtype": torch.float8_e4m3fn},
        {"spec": PagedKV(2, 264)},
        {"spec": PagedKV(2, 84)},
        {"block_size": 64},
        {"capability": (8, 0)},
        {"capability": (10, 0)},
    ):
        assert not library.supports(dataclasses.replace(layers, **change)), change


def test_a_package_that_is_missing_is_an_import_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    with pytest.raises(ImportError):
        FlashAttention3(torch.device("cpu"))
