"""Integers in groups, of every instruction set, against float64 over inputs that are rounded alike."""

import pytest
import torch
import torch.nn.functional as F

from tests.engine.given_weights import given, given_experts
from tests.engine.kernels.cpu.test_layers import assert_close, random
from tests.engine.native_variants import RUNNABLE, load_variant
from weft.engine.families.experts import Gating
from weft.engine.kernels.cpu.layer_kernels import CpuKernels, WeightStorage
from weft.engine.kernels.cpu.layers import NativeLinear
from weft.engine.kernels.cpu.library import NativeLibrary
from weft.engine.kernels.cpu.packed import Form, GroupedRows, common_form, form_of, round_rows, rows_of
from weft.engine.weights.groups import Groups, stacked
from weft.engine.weights.quantization import Scheme

FORMS = [Form(4, 32), Form(4, 32, True)]
FORMS += [Form(bits, group, has_offset) for bits in (6, 8) for group in (16, 32) for has_offset in (False, True)]
INT8, INT4 = Form(8, 32), Form(4, 32, True)
ROWS = (1, 2, 4, 6, 7, 40)
SIZES = [(16, 64), (40, 32), (130, 256), (200, 96), (9, 1056)]
every_form = pytest.mark.parametrize("form", FORMS, ids=str)


def draw(form: Form, num_outputs: int, num_inputs: int) -> GroupedRows:
    """Scales and offsets of rows differ a thousandfold, and some are 0 or below."""
    groups = num_outputs, num_inputs // form.group
    sizes = torch.exp(torch.randn(num_outputs, 1) * 2 - 4)
    values = torch.randint(0, 1 << form.bits, (num_outputs, num_inputs), dtype=torch.uint8)
    scales = (torch.rand(groups) - 0.2).mul(2.0 ** (1 - form.bits)) * sizes
    scales[0] = 0
    return GroupedRows(values, scales, torch.randn(groups) * sizes if form.has_offset else None)


def weights_of(rows: GroupedRows, form: Form) -> torch.Tensor:
    """In float64, with the scales and offsets of before they are packed in half precision."""
    values = rows.values.double().unflatten(1, (-1, form.group))
    if rows.offsets is None:
        return ((values - form.centre) * rows.scales.double()[..., None]).flatten(1)
    return (values * rows.scales.double()[..., None] - rows.offsets.double()[..., None]).flatten(1)


def rounded(inputs: torch.Tensor, group: int) -> torch.Tensor:
    """Inputs as int8 with a scale for each group, in float64."""
    groups = inputs.float().unflatten(1, (-1, group))
    largest = groups.abs().amax(-1, keepdim=True)
    return ((groups * (127 / largest)).round().nan_to_num().double() * (largest.double() / 127)).flatten(1)


def inputs_of(form: Form, num_rows: int, num_inputs: int) -> torch.Tensor:
    """Without what lies in the middle of two integers, where instruction sets may round to either."""
    inputs = random(num_rows, num_inputs)
    groups = inputs.double().unflatten(1, (-1, form.group))
    places = (groups * (127 / groups.abs().amax(-1, keepdim=True))).flatten(1)
    return inputs.where((places - places.floor() - 0.5).abs() > 1e-4, 0.0)


def linear_of(library: NativeLibrary, rows: GroupedRows, form: Form, bias: torch.Tensor | None = None) -> NativeLinear:
    return NativeLinear(library, rows, bias, storage=form)


@every_form
@pytest.mark.parametrize(("out_features", "in_features"), SIZES)
def test_linear(library: NativeLibrary, out_features: int, in_features: int, form: Form) -> None:
    torch.manual_seed(0)
    rows, bias = draw(form, out_features, in_features), random(out_features)
    linear, weight = linear_of(library, rows, form, bias), weights_of(rows, form)
    for num_rows in ROWS:
        inputs = torch.cat((inputs_of(form, num_rows, in_features), random(num_rows, 16)), 1)[:, :in_features]
        inputs[0, :40] = 0
        exact = F.linear(rounded(inputs, form.group), weight, bias.double())
        error = (linear.to_float32(inputs).double() - exact).abs()
        assert (error <= 2e-3 * F.linear(inputs.double().abs(), weight.abs()) + 1e-6).all()
        residual = random(num_rows, out_features)
        sums = residual.clone()
        linear.add_to(sums, inputs)
        assert torch.equal(sums, (linear.to_float32(inputs) + residual.float()).bfloat16())


@every_form
def test_the_largest_products_stay_whole(library: NativeLibrary, form: Form) -> None:
    """Two of them are added in 16 bits, which hold little more, and drawn numbers never come near."""
    values = torch.tensor([0, (1 << form.bits) - 1] * 8, dtype=torch.uint8)[:, None].repeat(1, 64)
    scales = torch.ones(16, 64 // form.group)
    rows = GroupedRows(values, scales, torch.zeros_like(scales) if form.has_offset else None)
    inputs = torch.ones(4, 64, dtype=torch.bfloat16)
    inputs[1], inputs[2, ::2], inputs[3, :32] = -1, -1, -1
    sums = linear_of(library, rows, form).to_float32(inputs).double()
    assert torch.allclose(sums, F.linear(inputs.double(), weights_of(rows, form)), rtol=1e-5, atol=1e-3)


@every_form
def test_rows_of_a_table(library: NativeLibrary, form: Form) -> None:
    torch.manual_seed(0)
    rows, ids = draw(form, 50, 96), torch.randint(0, 50, (70,))
    weight = weights_of(rows, form)
    error = (linear_of(library, rows, form).gather(ids).double() - weight[ids]).abs()
    assert (error <= 2**-8 * weight[ids].abs() + 2**-10 * weight[ids].abs().amax(1, keepdim=True)).all()


@every_form
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_row_does_not_feel_the_others(library: NativeLibrary, num_threads: int, form: Form) -> None:
    torch.manual_seed(0)
    library.set_num_threads(num_threads)
    linear, inputs = linear_of(library, draw(form, 200, 160), form), random(70, 160)
    alone = torch.cat([linear.to_float32(inputs[row : row + 1]).clone() for row in range(70)])
    for num_rows in (*range(2, 14), 16, 17, 33, 70):
        assert torch.equal(linear.to_float32(inputs[:num_rows]), alone[:num_rows])


@every_form
def test_cuts_between_many_rows_and_inputs_leave_no_trace(library: NativeLibrary, form: Form) -> None:
    """Tiles take 1024 inputs at once, and 256 rows."""
    torch.manual_seed(0)
    linear, inputs = linear_of(library, draw(form, 40, 1184), form), random(270, 1184)
    together = linear.to_float32(inputs).clone()
    for row in (0, 14, 254, 266):
        few = slice(row, row + 4)
        assert torch.equal(linear.to_float32(inputs[few]), together[few])


def test_four_bits_are_rounded_with_less_error_than_from_the_extremes(library: NativeLibrary) -> None:
    torch.manual_seed(0)
    weight = random(64, 256) * (1 + 5 * (torch.rand(64, 256) > 0.97))
    weight[3] = 0.5
    weight[4, :32] = 0
    rows = round_rows(library, weight, INT4)
    kept = weights_of(rows, INT4)
    assert torch.equal(kept[3], weight[3].double())
    assert torch.equal(kept[4, :32], weight[4, :32].double())
    groups = weight.double().unflatten(1, (-1, 32))
    least, step = groups.amin(-1, keepdim=True), (groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)) / 15
    plain = (((groups - least) / step).round().nan_to_num() * step + least).flatten(1)
    error, plain_error = ((kept - weight).square().sum(), (plain - weight).square().sum())
    assert error < 0.9 * plain_error


def test_eight_bits_reach_the_largest_magnitude(library: NativeLibrary) -> None:
    """What lies on such a grid is kept as it is, up to the precision of scales."""
    torch.manual_seed(0)
    weight = torch.randint(-127, 128, (200, 160)).bfloat16() / 64
    weight[:, ::32] = 127 / 64
    weight[9] = 0
    rows = round_rows(library, weight, INT8)
    assert rows.offsets is None
    assert torch.equal(weights_of(rows, INT8).float(), weight.float())
    linear = NativeLinear(library, weight, None, storage=INT8)
    torch.testing.assert_close(linear.gather(torch.arange(200)), weight, atol=0, rtol=2**-7)
    assert sum(tensor.nbytes for tensor in linear.matrix.tensors) == 208 * (192 * 17 // 16 + 4)


@pytest.mark.parametrize(("storage", "form"), [("int8", INT8), ("int4", INT4)])
def test_layers_are_made_of_such_matrices(library: NativeLibrary, storage: WeightStorage, form: Form) -> None:
    torch.manual_seed(0)
    kernels, weight = CpuKernels(library, storage), random(96, 64) * 0.1
    kept = weights_of(round_rows(library, weight, form), form)
    inputs = random(5, 64)
    gate, up = F.linear(rounded(inputs, 32), kept).chunk(2, dim=1)
    assert_close(kernels.gated(*given(weight), "silu")(inputs), F.silu(gate) * up)
    embedding, head = kernels.tied(*given(weight))
    assert_close(embedding(torch.arange(96)), kept)
    assert_close(head(inputs), torch.cat((gate, up), dim=1))
    narrow = random(16, 34)
    assert torch.equal(kernels.linear(*given(narrow))(random(1, 34) * 0), torch.zeros(1, 16).bfloat16())


def test_experts_are_as_their_matrices_alone(library: NativeLibrary) -> None:
    torch.manual_seed(0)
    kernels, num_experts = CpuKernels(library, "int4"), 5
    gate_up, down = random(num_experts, 128, 96) * 0.1, random(num_experts, 96, 64) * 0.1
    experts = kernels.experts(*given_experts(gate_up, down, None, None), Gating())
    inputs, ids = random(23, 96), torch.randint(0, num_experts, (23, 1))
    sums = torch.zeros(23, 96).bfloat16()
    experts.add_to(sums, inputs, ids, torch.ones(23, 1))
    alone = [
        kernels.linear(*given(down[e]))(kernels.gated(*given(gate_up[e]), "silu")(inputs[row : row + 1]))
        for row, e in enumerate(ids[:, 0].tolist())
    ]
    assert torch.equal(sums, torch.cat(alone))


def test_all_instruction_sets_agree(library: NativeLibrary) -> None:
    """Sums over groups are whole numbers; their float32 sums are fused in the same way."""
    torch.manual_seed(0)
    form = Form(4, 32)
    inputs = inputs_of(form, 3, 512)
    rows = draw(form, 64, 512)
    ours = linear_of(library, rows, form).to_float32(inputs).clone()
    for variant in set(RUNNABLE) - {"portable"}:
        other = linear_of(load_variant(variant), rows, form).to_float32(inputs)
        torch.testing.assert_close(other, ours, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("bits", "size", "has_zeros", "form"),
    [
        (4, 128, True, Form(4, 32, True)),
        (4, 32, False, Form(4, 32)),
        (8, 64, True, Form(8, 32, True)),
        (8, 256, False, Form(8, 32)),
        (2, 64, False, Form(4, 32)),
        (8, 16, False, Form(8, 16)),
        (4, 16, True, Form(6, 16, True)),
        (6, 16, False, Form(6, 16)),
        (5, 32, True, Form(6, 32, True)),
    ],
)
def test_groups_of_checkpoints_are_kept_as_they_are(bits: int, size: int, has_zeros: bool, form: Form) -> None:
    torch.manual_seed(0)
    most = 1 << (bits - 1)
    values, groups = torch.randint(-most, most, (48, 256), dtype=torch.int8), (48, 256 // size)
    scales = torch.rand(groups).half().float()
    zeros = torch.randint(-most, most, groups).float() if has_zeros else None
    stored = Groups(values, scales, zeros, bits, size)
    found = rows_of(stored)
    assert found is not None
    assert found[0] == form
    assert form_of(Scheme(bits, size, has_zeros=has_zeros), 256) == form
    torch.testing.assert_close(
        weights_of(found[1], form).float(), stored.dequantize(torch.float32), atol=1e-4, rtol=1e-6
    )


@pytest.mark.parametrize("columns", [slice(0, 224), slice(32, 128), slice(224, 256)], ids=str)
@pytest.mark.parametrize("has_zeros", [False, True])
def test_parts_that_begin_or_end_inside_of_a_group_are_kept(columns: slice, has_zeros: bool) -> None:
    torch.manual_seed(0)
    values = torch.randint(-8, 8, (20, 256), dtype=torch.int8)
    zeros = torch.randint(-8, 8, (20, 2)).float() if has_zeros else None
    stored = Groups(values, torch.rand(20, 2).half().float(), zeros, 4, 128).part(torch.arange(20), columns)
    found = rows_of(stored)
    assert found is not None
    weight = weights_of(found[1], found[0]).float()
    torch.testing.assert_close(weight, stored.dequantize(torch.float32), atol=1e-4, rtol=1e-6)


def test_matrices_of_unlike_groups_share_the_wider_form() -> None:
    """Such as queries in Q4_K and values in Q6_K, which were kept in bfloat16."""
    torch.manual_seed(0)
    offsets = torch.rand(4, 2).half().float()
    four = Groups(torch.randint(0, 16, (4, 64), dtype=torch.int8), torch.rand(4, 2), None, 4, 32, offsets=offsets)
    six = Groups(torch.randint(-32, 32, (4, 64), dtype=torch.int8), torch.rand(4, 4), None, 6, 16)
    both = stacked([four, six])
    assert both is not None
    weight = torch.cat((four.dequantize(torch.float32), six.dequantize(torch.float32)))
    assert torch.equal(both.dequantize(torch.float32), weight)
    form, rows = rows_of(both) or pytest.fail("not kept")
    assert form == Form(6, 16, True) == common_form([Form(4, 32, True), Form(6, 16)])
    torch.testing.assert_close(weights_of(rows, form).float(), weight, atol=1e-4, rtol=1e-6)
    alone = rows_of(four)
    assert alone is not None and alone[0] == Form(4, 32, True)


def test_groups_without_zero_points_fit_a_form_with_offsets() -> None:
    stored = Groups(torch.randint(-8, 8, (4, 64), dtype=torch.int8), torch.rand(4, 2), None, 4, 32)
    found = rows_of(stored, Form(4, 32, True))
    assert found is not None
    torch.testing.assert_close(weights_of(found[1], found[0]).float(), stored.dequantize(torch.float32))
    assert rows_of(stored, Form(8, 16)) is None


@pytest.mark.parametrize(
    "groups",
    [
        Groups(torch.zeros(4, 64, dtype=torch.float8_e4m3fn), torch.ones(4, 2), None, 8, 32),
        Groups(torch.zeros(4, 48, dtype=torch.int8), torch.ones(4, 1), None, 4, 48),
        Groups(torch.zeros(4, 64, dtype=torch.int8), torch.ones(4, 2), None, 4, 32, torch.arange(64) % 2),
    ],
    ids=["floats", "inputs", "order"],
)
def test_what_the_kernels_do_not_take(groups: Groups) -> None:
    assert rows_of(groups) is None


@every_form
@pytest.mark.parametrize("fault", [float("nan"), float("inf")])
def test_what_is_no_number_stays_in_its_row(library: NativeLibrary, fault: float, form: Form) -> None:
    torch.manual_seed(0)
    rows = draw(form, 40, 96)
    linear, inputs = linear_of(library, GroupedRows(rows.values, rows.scales + 1, rows.offsets), form), random(3, 96)
    right = linear.to_float32(inputs).clone()
    inputs[1, 50] = fault
    found = linear.to_float32(inputs)
    assert not found[1].isfinite().any()
    assert torch.equal(found[::2], right[::2])
