"""The GPU that is not there sees what would go wrong on one that is."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch

from tests.fake_gpu.gpu import FakeGpu


def launch_norm(hidden: torch.Tensor) -> None:
    from weft.engine.kernels.triton.layer_kernels import TritonKernels

    TritonKernels().norm(torch.ones(hidden.size(1), dtype=torch.bfloat16, device="cuda"), 1e-6)(hidden)


def test_launches_are_counted_and_views_and_memory_are_not() -> None:
    with FakeGpu(compiles=False) as gpu:
        hidden = torch.empty(6, 64, dtype=torch.bfloat16, device="cuda")
        launch_norm(hidden.view(2, 3, 64)[1].contiguous().clone())
        hidden.t() @ hidden[:, :8]
        torch.arange(4).pin_memory().to("cuda", non_blocking=True)
    assert gpu.launches == Counter(
        {"aten.ones.default": 1, "aten.clone.default": 1, "rms_norm": 1, "aten.mm.default": 1}
        | {"copy from or to the host": 1}
    )
    assert gpu.cuda.waits == []


@pytest.mark.parametrize(
    "read",
    [
        lambda values: values.sum().item(),
        lambda values: values.tolist(),
        lambda values: values.cpu(),
        lambda values: bool((values > 0).all()),
        lambda values: torch.equal(values, values),
        lambda values: values.copy_(torch.ones(4)),
        lambda values: torch.zeros(4).copy_(values),
        lambda values: torch.tensor([1.0], device="cuda"),
    ],
)
def test_waiting_is_noted(read: Callable[[torch.Tensor], object]) -> None:
    with FakeGpu(compiles=False) as gpu:
        read(torch.ones(4, device="cuda"))
    assert len(gpu.cuda.waits) == 1


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda values: values @ values.float(), "mm.default of"),
        (lambda values: values.addmm_(values, values.float()), "addmm_.default of"),
        (lambda values: torch.mm(values, values, out_dtype=torch.float64), "to torch.float64"),
        (lambda values: values.index_select(0, torch.ones(4, device="cuda")), "indices of torch.float32"),
        (lambda values: values @ values[:, :3].t(), "reduction dim"),
        (lambda values: values.add_(torch.ones(4, 4)), "same device"),
        (lambda values: values.nonzero(), "nonzero"),
    ],
)
def test_what_is_not_legal_fails(call: Callable[[torch.Tensor], object], error: str) -> None:
    with FakeGpu(compiles=False), pytest.raises(Exception, match=error):
        call(torch.empty(4, 4, dtype=torch.bfloat16, device="cuda"))


def test_another_alignment_or_size_is_another_variant() -> None:
    with FakeGpu(compiles=False) as gpu:
        values = torch.empty(4 * 64 + 8, dtype=torch.bfloat16, device="cuda")
        num_variants = []
        for start in (0, 64, 128, 1, 8):
            launch_norm(values[start : start + 64].view(1, 64))
            num_variants.append(len(gpu.record.variants))
        launch_norm(values[:48].view(1, 48))
        launch_norm(values[:128].view(1, 128))
    assert num_variants == [1, 1, 1, 2, 2]
    assert [variant.constants["BLOCK"] for variant in gpu.record.variants[2:]] == [128]
    assert gpu.launches["rms_norm"] == 7


def test_graphs_launch_what_was_recorded() -> None:
    from weft.engine.device import CudaCapture

    with FakeGpu(compiles=False) as gpu:
        values = torch.empty(4, 64, dtype=torch.bfloat16, device="cuda")
        weight = torch.empty(64, 64, dtype=torch.bfloat16, device="cuda")
        replay, output = CudaCapture().record(lambda: values @ weight)
        replay()
        replay()
    assert output.shape == (4, 64)
    assert gpu.launches == Counter({"aten.mm.default": 3})
