from pathlib import Path

import pytest

from tests.triton_compilation import ARCHITECTURES, compile_kernel
from tests.triton_interpreter import needs_triton, run_interpreted

TYPES = {
    **dict.fromkeys(
        ("logits", "parameters", "chunk_bests", "part_bests", "part_masses", "floors", "lists", "sure_masses"), "*fp32"
    ),
    **dict.fromkeys(("bits", "part_best_ids", "counts", "sizes", "packed"), "*i32"),
    **dict.fromkeys(("vocab_size", "num_words", "num_parts", "num_ids"), "i32"),
    **dict.fromkeys(("token_ids", "previous_token_ids", "bins"), "*i64"),
    **dict.fromkeys(("totals", "apart"), "*fp64"),
}


@needs_triton
def test_parity_in_the_interpreter() -> None:
    run_interpreted(Path(__file__).with_name("interpreted_sampling.py"))


@needs_triton
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_compile(architecture: int) -> None:
    from weft.engine.kernels.triton import sampling_kernels as kernels
    from weft.engine.kernels.triton.penalties import penalise

    sizes = {"PART": 4096, "CHUNK": 128, "NUM_PARTS": 64, "WIDTH": 32, "SHORT": 2048, "TILE": 2048}
    for kernel in (kernels.summarise, kernels.decide, kernels.collect, kernels.narrow, kernels.draw, penalise):
        constants = {name: size for name, size in sizes.items() if name in kernel.arg_names}
        compile_kernel(kernel, architecture, 8, TYPES, constants)
