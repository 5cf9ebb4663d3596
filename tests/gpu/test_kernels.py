"""Every kernel of Weft's own on the GPU against the same reference as in Triton's interpreter.

The checks lie beside the tests of each kernel; what imports triton is imported here by the tests alone, since CPU
installations have none.
"""

import dataclasses
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ATTENTION = [
    ("check_mixed_steps", "MIXED"),
    ("check_decodes", "DECODES"),
    ("check_libraries", "LIBRARIES"),
    ("check_pictures", "PICTURES"),
    ("check_mixed_steps", "TILED"),
    ("check_decodes", "TILED"),
    ("check_copies", "COPIES"),
    ("check_recorded_steps", "RECORDED"),
    ("check_invariance", "INVARIANT"),
]
"""Check and cases, both of `attention_parity`."""


def run(check: Any, *arguments: Any) -> None:
    """Run a check; its failure names what it was given."""
    try:
        check(*arguments)
    except AssertionError as error:
        error.add_note(f"{check.__name__}{arguments}")
        raise


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("check", "cases"), ATTENTION)
def test_attention(check: str, cases: str) -> None:
    """Half precision is run as bfloat16, which the interpreter cannot compute, and the first case as float16, too."""
    from tests.engine.kernels.triton import attention_parity as parity

    for number, case in enumerate(getattr(parity, cases)):
        halves = [torch.bfloat16] if number else [torch.float16, torch.bfloat16]
        for dtype in halves if case.dtype == torch.float16 else [case.dtype]:
            run(getattr(parity, check), dataclasses.replace(case, dtype=dtype), torch.device("cuda"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layers(dtype: torch.dtype) -> None:
    from tests.engine.kernels.triton import layer_parity as parity

    for check in parity.CHECKS:
        run(check, torch.device("cuda"), dtype)


@pytest.mark.timeout(600)
def test_few_rows() -> None:
    from tests.engine.kernels.triton import few_rows_parity as parity
    from weft.engine.kernels.triton.layers_jit import supports_dependent_launch

    device = torch.device("cuda")
    for check in parity.CHECKS:
        run(check, device, torch.bfloat16)
    if supports_dependent_launch(device):
        run(parity.check_early_starts, device)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_packed(dtype: torch.dtype) -> None:
    from tests.engine.kernels.triton import packed_parity as parity

    checks = [*parity.CHECKS]
    if torch.cuda.get_device_capability() < (8, 9):
        checks.remove(parity.check_fp8_products)
    for check in checks:
        run(check, torch.device("cuda"), dtype)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_experts(dtype: torch.dtype) -> None:
    """In bfloat16 by torch's grouped product where there is one, else by Weft's."""
    from tests.engine.kernels.triton import experts_parity as parity

    for check in parity.CHECKS:
        run(check, torch.device("cuda"), dtype)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_adapters(dtype: torch.dtype) -> None:
    from tests.engine.kernels.triton import adapters_parity as parity

    for check in parity.CHECKS:
        run(check, torch.device("cuda"), dtype)


@pytest.mark.timeout(600)
def test_sampling() -> None:
    from tests.engine.kernels.triton import sampling_parity as parity

    for vocab_size in (*parity.SMALL_VOCABULARIES, *parity.LARGE_VOCABULARIES):
        run(parity.check_ids, torch.device("cuda"), vocab_size)
    for check in parity.CHECKS:
        run(check, torch.device("cuda"))


@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 12288), (151936, 1024)], ids=str)
def test_rows_of_tiled_products_are_alone(shape: tuple[int, int]) -> None:
    """Bit for bit, at every number of rows; and right."""
    from weft.engine.kernels.torch.layer_kernels import TiledLinear, forbid_split_sums

    forbid_split_sums()
    generator = torch.Generator("cuda").manual_seed(0)
    weight, inputs = (
        torch.randn(size, shape[1], generator=generator, device="cuda").bfloat16() for size in (shape[0], 300)
    )
    linear = TiledLinear(weight)
    together = linear(inputs).clone()
    torch.testing.assert_close(together.float(), inputs.float() @ weight.float().t(), atol=2.0, rtol=2e-2)
    for num_rows in (1, 2, 7, 64, 127, 128, 129, 255):
        assert torch.equal(linear(inputs[:num_rows].clone()), together[:num_rows]), f"{num_rows} rows"
    for places in (1, 17, 64, 100):  # a request stands elsewhere in its tile from step to step
        assert torch.equal(linear(inputs.roll(places, 0)), together.roll(places, 0)), f"rolled by {places}"
