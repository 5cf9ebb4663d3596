"""Checks of packed matrices against what they stand for, on any device: Triton's interpreter or a GPU."""

import torch

from tests.engine.kernels.experts_reference import GATINGS, Weights, exact, routes
from weft.engine.kernels.triton.packed import PackedMatrix, form_of, pack
from weft.engine.kernels.triton.products import Fp8Linear, PackedLinear, TritonExperts, round_rows
from weft.engine.tune.triton_trials import random_groups
from weft.engine.weights.groups import Groups, round_matrix
from weft.engine.weights.quantization import Scheme

SCHEMES = {
    "int4": Scheme(4, 32),
    "int4 zeros": Scheme(4, 64, has_zeros=True),
    "int4 narrow": Scheme(4, 16),
    "int4 outputs": Scheme(4),
    "int8": Scheme(8),
    "int8 zeros": Scheme(8, 128, has_zeros=True),
    "mxfp4": Scheme(4, 32, is_float=True),
    "nvfp4": Scheme(4, 16, is_float=True),
    "fp8": Scheme(8, is_float=True),
    "fp8 blocks": Scheme(8, block=(128, 128), is_float=True),
}
COLUMNS = 160
"""Neither a multiple of a tile, nor of the groups of 64 and 128."""

PRECISION = {torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Relative error of products: weights are rounded to the type of inputs, and scales to half precision."""


def draw(scheme: Scheme, device: torch.device, rows: int = 40, columns: int = COLUMNS) -> tuple[PackedMatrix, Groups]:
    groups = random_groups(torch.randn(rows, columns).to(device), scheme)
    matrix = pack(groups, form_of(scheme, columns))
    assert matrix is not None
    assert matrix.nbytes == matrix.form.num_bytes(rows, columns), "what is planned is what it takes"
    return matrix, groups


def assert_near(outputs: torch.Tensor, right: torch.Tensor, tolerance: float) -> None:
    error = torch.linalg.vector_norm(outputs.double() - right, dim=1) / torch.linalg.vector_norm(right, dim=1)
    assert error.max() < tolerance


def check_products(device: torch.device, dtype: torch.dtype) -> None:
    """Few rows, more, and so many that the matrix is unpacked; with bias and residual, and without."""
    torch.manual_seed(0)
    for index, scheme in enumerate(SCHEMES.values()):
        matrix, groups = draw(scheme, device)
        weight, bias = groups.dequantize(torch.float32).double(), torch.randn(40).to(device, dtype)
        torch.testing.assert_close(matrix.unpack(torch.float32, num_rows=40).double(), weight, atol=0, rtol=1e-3)
        ids = torch.tensor([39, 0, 7], device=device)
        assert torch.equal(matrix.unpack(dtype, ids=ids), matrix.unpack(dtype, num_rows=40)[ids])
        linear = PackedLinear(matrix, bias if index % 2 else None)
        for num_rows in (3, 20) if index else (0, 1, 20, 257):
            inputs, residual = (torch.randn(num_rows, size).to(device, dtype) for size in (COLUMNS, 40))
            right = inputs.double() @ weight.T + (bias.double() if index % 2 else 0)
            outputs = linear.to_float32(inputs) if num_rows % 2 else linear(inputs)
            sums = residual.clone()
            if num_rows == 20 or not index:
                linear.add_to(sums, inputs)
                right, outputs = torch.cat((right, right + residual.double())), torch.cat((outputs, sums.to(outputs)))
            if num_rows:
                assert_near(outputs, right, PRECISION[dtype])


def check_logits(device: torch.device, dtype: torch.dtype) -> None:
    """Those of many rows were rounded to the type of the inputs, which is far too coarse for a choice among ids."""
    logits = PackedLinear(draw(SCHEMES["int8"], device)[0], None).to_float32(
        torch.randn(257, COLUMNS).to(device, dtype)
    )
    assert (logits != logits.to(dtype)).any(1).all()


def check_rows_alone(device: torch.device, dtype: torch.dtype) -> None:
    """If it is deterministic, a row's bits do not depend on the others."""
    torch.manual_seed(0)
    linear = PackedLinear(draw(SCHEMES["int4 zeros"], device)[0], None, is_deterministic=True)
    inputs = torch.randn(70, COLUMNS).to(device, dtype)
    together = linear(inputs)
    for row in (0, 20, 69):
        assert torch.equal(linear(inputs[row : row + 1]), together[row : row + 1])


def check_experts(device: torch.device, dtype: torch.dtype) -> None:
    """MXFP4 as gpt-oss has it, and 4-bit integers; few rows of an expert, and many."""
    torch.manual_seed(0)
    for name, num_rows in (("mxfp4", 2), ("int4", 40), ("int4", 150)):
        packed, plain = [], []
        for rows, columns in ((128, 96), (96, 64)):
            matrices, groups = zip(*(draw(SCHEMES[name], device, rows, columns) for _ in range(3)), strict=True)
            stacked = matrices[0].empty_experts(3)
            for index, matrix in enumerate(matrices):
                stacked.put(index, matrix)
            packed.append(stacked)
            plain.append(torch.stack([each.dequantize(torch.float32) for each in groups]))
        weights = Weights(plain[0], plain[1], *(torch.randn(3, rows).to(device, dtype) for rows in (128, 96)))
        experts = TritonExperts(
            *(packed[0], weights.gate_up_bias, packed[1], weights.down_bias, GATINGS["limited"]),
            is_deterministic=False,
            is_dependent=False,
        )
        ids = next(routes(num_rows, 3, 2))
        inputs, shares = torch.randn(num_rows, 96).to(device, dtype), torch.rand(num_rows, 2).to(device)
        sums = torch.zeros(num_rows, 96, device=device, dtype=dtype)
        experts.add_to(sums, inputs, ids.to(device), shares)
        assert_near(sums.cpu(), exact(weights, GATINGS["limited"], inputs, ids, shares), 3 * PRECISION[dtype])


def check_fp8_products(device: torch.device, dtype: torch.dtype) -> None:
    """Rows are rounded each by itself, or by groups; the products of what is rounded are exact but for their sums."""
    torch.manual_seed(0)
    for name in ("fp8", "fp8 blocks"):
        matrix, groups = draw(SCHEMES[name], device, 48, 256)
        assert Fp8Linear.supports(matrix)
        bias = torch.randn(48).to(device, dtype) if name == "fp8" else None
        inputs = (torch.randn(66, 256) * torch.rand(66, 1) * 50).to(device, dtype)
        rounded, scales = round_rows(inputs, matrix.form.group)
        size = matrix.form.group or 256
        assert scales.shape == (66, 256 // size)
        meant = (rounded.double().unflatten(1, (-1, size)) * scales.double()[..., None]).flatten(1)
        # The interpreter makes half of a value that has to be rounded up to a power of two.
        assert_near(inputs, meant, 0.04 if device.type == "cuda" else 0.2)
        assert rounded.float().abs().unflatten(1, (-1, size)).amax(-1).eq(448).all()
        right = meant @ groups.dequantize(torch.float32).double().T + (0 if bias is None else bias.double())
        assert_near(Fp8Linear(matrix, bias)(inputs), right, PRECISION[dtype])
        few = inputs[:5].double() @ groups.dequantize(torch.float32).double().T
        assert_near(Fp8Linear(matrix, None)(inputs[:5]), few, PRECISION[dtype])


def check_offsets(device: torch.device) -> None:
    """As GGUF files have them; a scale of 0, or of next to nothing, leaves the offset alone."""
    scales, offsets = torch.rand(8, 2, device=device), torch.randn(8, 2, device=device)
    scales[0], offsets[1, 0], scales[2, 0], offsets[2, 0] = 0.0, 0.0, 1e-6, 1.0
    for most, kind in ((15, "int4"), (31, "int8")):
        values = torch.randint(0, most + 1, (8, 64), device=device).to(torch.int8)
        groups = Groups(values, scales, None, 4 if kind == "int4" else 5, 32, offsets=offsets)
        matrix = pack(groups)
        assert matrix is not None and matrix.form.kind == kind
        unpacked = matrix.unpack(torch.float32, num_rows=8)
        torch.testing.assert_close(unpacked, groups.dequantize(torch.float32), atol=2e-3, rtol=2e-3)


def check_rounding(device: torch.device, dtype: torch.dtype) -> None:
    """Matrices that are quantized while they are loaded; groups of equal weights are kept as they are."""
    torch.manual_seed(0)
    weight = torch.randn(8, 64).to(device, dtype)
    weight[0], weight[1, :32], weight[2] = 0.25, 0.0, weight[2] * 1e-4
    check_offsets(device)
    for storage, error in (("int8", 0.012), ("int4", 0.12), ("fp8", 0.04)):
        groups = round_matrix(weight, storage)
        matrix = pack(groups)
        assert matrix is not None
        assert_near(matrix.unpack(torch.float32, num_rows=8), weight.double(), error)


CHECKS = (check_products, check_logits, check_rows_alone, check_experts, check_fp8_products, check_rounding)
