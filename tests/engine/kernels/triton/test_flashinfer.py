"""FlashInfer by a stand-in for its package, which checks arguments as the real one does and computes with torch.

The signatures are those of flashinfer/prefill.py in github.com/flashinfer-ai/flashinfer, version 0.6.18.
"""

import dataclasses
import sys
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.kernels.triton import prompts
from weft.engine.cache.specs import PagedKV
from weft.engine.kernels.triton import prompts as flashinfer
from weft.engine.kernels.triton.prompts import FlashInfer, PromptLayers


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(
        self,
        float_workspace_buffer: Any,
        kv_layout: Any = "NHD",
        use_cuda_graph: Any = False,
        qo_indptr_buf: Any = None,
        paged_kv_indptr_buf: Any = None,
        paged_kv_indices_buf: Any = None,
        paged_kv_last_page_len_buf: Any = None,
        custom_mask_buf: Any = None,
        mask_indptr_buf: Any = None,
        backend: Any = "auto",
        jit_args: Any = None,
        jit_kwargs: Any = None,
    ) -> None:
        assert float_workspace_buffer.numel() >= 128 << 20
        assert kv_layout == "HND"

    def plan(
        self,
        qo_indptr: Any,
        paged_kv_indptr: Any,
        paged_kv_indices: Any,
        paged_kv_last_page_len: Any,
        num_qo_heads: Any,
        num_kv_heads: Any,
        head_dim_qk: Any,
        page_size: Any,
        head_dim_vo: Any = None,
        custom_mask: Any = None,
        packed_custom_mask: Any = None,
        causal: Any = False,
        pos_encoding_mode: Any = "NONE",
        use_fp16_qk_reduction: Any = False,
        sm_scale: Any = None,
        window_left: Any = -1,
        logits_soft_cap: Any = None,
        rope_scale: Any = None,
        rope_theta: Any = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        non_blocking: Any = True,
        prefix_len_ptr: Any = None,
        token_pos_in_items_ptr: Any = None,
        token_pos_in_items_len: Any = 0,
        max_item_len_ptr: Any = None,
        seq_lens: Any = None,
        seq_lens_q: Any = None,
        block_tables: Any = None,
        max_token_per_sequence: Any = None,
        max_sequence_kv: Any = None,
        fixed_split_size: Any = None,
        disable_split_kv: Any = False,
    ) -> None:
        arrays = qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        assert all(array.dtype == torch.int32 and array.device.type == "cpu" for array in arrays)
        self.starts, self.indptr, self.indices, self.last_page_len = (array.tolist() for array in arrays)
        assert len(self.starts) == len(self.indptr) == len(self.last_page_len) + 1
        assert len(self.indices) == self.indptr[-1]
        assert all(1 <= length <= page_size for length in self.last_page_len)
        assert causal
        assert disable_split_kv
        self.shape = num_qo_heads, num_kv_heads, head_dim_qk, page_size
        self.types = q_data_type, kv_data_type
        self.how = sm_scale, window_left, logits_soft_cap

    def run(self, q: Any, paged_kv_cache: Any) -> torch.Tensor:
        _, num_kv_heads, head_dim, page_size = self.shape
        assert q.shape == (self.starts[-1], *self.shape[::2])
        assert paged_kv_cache.shape[1:] == (2, num_kv_heads, page_size, head_dim)
        assert (q.dtype, paged_kv_cache.dtype) == self.types
        rows = []
        ranges = zip(pairwise(self.starts), pairwise(self.indptr), self.last_page_len, strict=True)
        for (a, b), (first, stop), last in ranges:
            pages = paged_kv_cache[self.indices[first:stop]]  # (num_pages, 2, num_kv_heads, page_size, head_dim)
            num_keys = (stop - first - 1) * page_size + last
            keys, values = pages.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :num_keys]
            rows.append(prompts.attend_to_one(q[a:b], keys, values, *self.how))
        return torch.cat(rows)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FlashInfer:
    wrapper = BatchPrefillWithPagedKVCacheWrapper
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=wrapper))
    return FlashInfer(torch.device("cpu"))


@pytest.mark.parametrize("case", [*prompts.FRESH, *prompts.CONTINUED], ids=str)
def test_prompts(library: FlashInfer, case: prompts.PromptCase) -> None:
    prompts.check(library, dataclasses.replace(case, parts=[]))


def test_a_step_is_planned_while_another_is_in_flight(library: FlashInfer) -> None:
    """A single wrapper would hand its second plan to the first step."""
    cases = [prompts.PromptCase(PagedKV(2, 64), [(0, length)]) for length in (20, 33)]
    steps = []
    for case in cases:
        found, cache = case.find()
        steps.append((case, library.begin(found, case.layers), cache))
    for case, step, cache in steps:
        attended = step.attend(*case.step_parts(step.tokens), cache, torch.from_numpy(step.starts.astype(np.int32)))
        torch.testing.assert_close(attended, case.expected(prompts_alone=True), atol=4e-3, rtol=4e-3)


def test_a_plan_waits_for_the_copy_of_the_one_that_it_overwrites(
    library: FlashInfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan of a step in flight would change on its way to the device."""
    waited: list[int] = []
    events = (SimpleNamespace(synchronize=lambda number=number: waited.append(number)) for number in range(9))
    monkeypatch.setattr(flashinfer, "mark", lambda device: next(events))
    case = prompts.PromptCase(PagedKV(2, 64), [(0, 20)])
    found, _ = case.find()
    for _ in range(4):
        library.begin(found, case.layers)
    other = dataclasses.replace(case.layers, spec=PagedKV(2, 64, sliding_window=30))
    library.begin(found, other)
    assert waited == [0, 1]


def test_what_it_computes(library: FlashInfer) -> None:
    layers = PromptLayers(PagedKV(2, 128, 100, 0.1, 50.0), 8, torch.bfloat16, torch.bfloat16, 64, (8, 0))
    assert library.supports(layers)
    for change in (
        {"dtype": torch.float32, "cache_dtype": torch.float32},
        {"cache_dtype": torch.float8_e4m3fn},
        {"spec": PagedKV(2, 80)},
        {"capability": (7, 5)},
    ):
        assert not library.supports(dataclasses.replace(layers, **change)), change


def test_a_package_that_is_missing_is_an_import_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ImportError):
        FlashInfer(torch.device("cpu"))
