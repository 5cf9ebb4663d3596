"""Native experts of every instruction set against float64."""

import pytest
import torch

from tests.engine.given_weights import given_experts
from tests.engine.kernels.cpu.test_layers import random
from tests.engine.kernels.experts_reference import GATINGS, Weights, draw, exact, routes
from weft.engine.families.experts import Gating
from weft.engine.kernels.cpu.layer_kernels import CpuKernels, WeightStorage
from weft.engine.kernels.cpu.library import NativeLibrary
from weft.engine.kernels.cpu.products import NativeExperts
from weft.engine.kernels.torch.layer_kernels import TorchExperts

ROWS = (1, 2, 5, 17, 64)
CPU = torch.device("cpu")


def assert_close(ours: torch.Tensor, right: torch.Tensor) -> None:
    """Within the rounding to bfloat16 between the matrices and of each expert's outputs."""
    torch.testing.assert_close(ours.double(), right, atol=0.04, rtol=0.01)


def experts_of(
    library: NativeLibrary,
    sizes: tuple[int, int, int],
    gating: Gating,
    *,
    storage: WeightStorage = "bfloat16",
    has_bias: bool = False,
) -> tuple[NativeExperts, Weights]:
    weights = draw(*sizes, torch.bfloat16, CPU, has_bias=has_bias)
    experts = CpuKernels(library, storage).experts(*given_experts(*weights.all), gating)
    assert isinstance(experts, NativeExperts)
    return experts, weights


@pytest.mark.parametrize("name", GATINGS)
@pytest.mark.parametrize(("sizes", "num_chosen"), [((8, 64, 48), 3), ((5, 32, 34), 1), ((70, 96, 16), 8)])
def test_parity(library: NativeLibrary, sizes: tuple[int, int, int], num_chosen: int, name: str) -> None:
    torch.manual_seed(0)
    gating, has_bias = GATINGS[name], name != "plain" and sizes[2] % 16 == 0
    experts, weights = experts_of(library, sizes, gating, has_bias=has_bias)
    for num_rows in ROWS:
        for ids in routes(num_rows, sizes[0], num_chosen):
            inputs, shares = random(num_rows, sizes[1] + 16)[:, : sizes[1]], torch.rand(num_rows, num_chosen)
            residual = random(num_rows, sizes[1])
            sums = residual.clone()
            experts.add_to(sums, inputs, ids, shares)
            assert_close(sums, residual.double() + exact(weights, gating, inputs, ids, shares))


@pytest.mark.parametrize("storage", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_row_does_not_feel_the_others(library: NativeLibrary, num_threads: int, storage: WeightStorage) -> None:
    torch.manual_seed(0)
    library.set_num_threads(num_threads)
    experts, _ = experts_of(library, (6, 160, 48), Gating(), storage=storage)
    inputs, shares = random(70, 160), torch.rand(70, 2)
    for ids in routes(70, 6, 2):
        alone = random(70, 160)
        sums = {num_rows: alone[:num_rows].clone() for num_rows in (2, 13, 33, 70)}
        for row in range(70):
            one = slice(row, row + 1)
            experts.add_to(alone[one], inputs[one], ids[one], shares[one])
        for num_rows, together in sums.items():
            first = slice(num_rows)
            experts.add_to(together, inputs[first], ids[first], shares[first])
            assert torch.equal(together, alone[first])


def test_more_rows_than_one_pass_takes(library: NativeLibrary) -> None:
    torch.manual_seed(0)
    experts, weights = experts_of(library, (3, 16, 16), Gating())
    inputs, residual, ids = random(5000, 16), torch.zeros(5000, 16).bfloat16(), torch.randint(0, 3, (5000, 4))
    experts.add_to(residual, inputs, ids, torch.full((5000, 4), 0.25))
    assert_close(residual, exact(weights, Gating(), inputs, ids, torch.full((5000, 4), 0.25)))


def test_what_no_kernel_computes_takes_the_plain_way(library: NativeLibrary) -> None:
    weights = draw(3, 32, 24, torch.bfloat16, CPU, has_bias=True)
    experts = CpuKernels(library).experts(*given_experts(*weights.all), Gating())
    assert isinstance(experts, TorchExperts)
    inputs, ids, shares, sums = (
        random(5, 32),
        torch.tensor([[0, 2]] * 5),
        torch.rand(5, 2),
        torch.zeros(5, 32).bfloat16(),
    )
    experts.add_to(sums, inputs, ids, shares)
    assert_close(sums, exact(weights, Gating(), inputs, ids, shares))
