"""Adapters on every instruction set against float64, and the gated matrix in two steps."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.engine.given_weights import given
from weft.engine.kernels.cpu.layer_kernels import CpuKernels
from weft.engine.kernels.cpu.layers import GATES, NativeLinear
from weft.engine.kernels.cpu.library import NativeLibrary
from weft.engine.kernels.cpu.products import MAX_RANK, AdapterMemory, NativeSite
from weft.engine.lora.adapted_layers import Delta, StepRows

SLOTS = np.array([0, 3, 1, 1, 3, 0, 2, *([1] * 13), 2])
CPU = torch.device("cpu")


def deltas_of(in_features: int, rank: int, *runs: tuple[int, int]) -> list[Delta]:
    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape) / shape[1] ** 0.5).bfloat16()

    return [Delta(first, draw(rank, in_features), draw(size, rank)) for first, size in runs]


def exact(outputs: torch.Tensor, inputs: torch.Tensor, adapters: dict[int, list[Delta]]) -> torch.Tensor:
    sums = outputs.double()
    for row, slot in enumerate(SLOTS.tolist()):
        for first, a, b in adapters.get(slot, []):
            sums[row, first : first + len(b)] += b.double() @ (a.double() @ inputs[row].double())
    return sums


@pytest.mark.parametrize(("out_features", "in_features"), [(96, 64), (130, 1030), (40, 7)])
@pytest.mark.parametrize("rank", [3, 16, 40, MAX_RANK])
def test_each_row_gets_what_its_adapter_makes(
    library: NativeLibrary, out_features: int, in_features: int, rank: int
) -> None:
    """Slot 3 was filled before, and slot 2 adds to some outputs only."""
    torch.manual_seed(0)
    adapters = {
        1: deltas_of(in_features, rank, (0, out_features)),
        2: deltas_of(in_features, 5, (3, 20), (30, 7)),
        3: deltas_of(in_features, rank, (0, 16), (16, out_features - 16)),
    }
    site = NativeSite(library, AdapterMemory(), in_features, 3, 0)
    for slot, deltas in {3: adapters[1], **adapters}.items():
        site.put(slot, deltas)
    rows = StepRows(SLOTS, CPU)
    inputs = torch.randn(len(SLOTS), in_features + 16).bfloat16()[:, :in_features]
    for dtype, tolerance in ((torch.float32, 2e-3), (torch.bfloat16, 0.02)):
        outputs = torch.randn(len(SLOTS), out_features + 1)[:, :out_features].to(dtype)
        right = exact(outputs, inputs, adapters)
        before = outputs[SLOTS == 0].clone()
        site.add(outputs, inputs, rows)
        torch.testing.assert_close(outputs.double(), right, atol=tolerance * 4, rtol=tolerance)
        assert torch.equal(outputs[SLOTS == 0], before)


@pytest.mark.parametrize("inner", [96, 70])
@pytest.mark.parametrize("activation", GATES)
@pytest.mark.parametrize("storage", ["bfloat16", "int8", "int4"])
def test_a_gated_matrix_in_two_steps_has_the_same_bits(
    library: NativeLibrary, inner: int, storage: str, activation: str
) -> None:
    torch.manual_seed(0)
    weight, inputs = (torch.randn(2 * inner, 64) / 8).bfloat16(), torch.randn(37, 64).bfloat16()
    gated = CpuKernels(library, storage).gated(*given(weight), activation)  # type: ignore[arg-type]
    assert isinstance(gated, NativeLinear)
    sums = gated.sums(inputs)
    if storage == "bfloat16":
        torch.testing.assert_close(sums.double(), F.linear(inputs.double(), weight.double()), atol=1e-3, rtol=1e-4)
    assert torch.equal(gated.activate(sums), gated(inputs))
