"""A form of groups is tried on real weights: kept if its products are right, named and left out if they are not."""

import ctypes
import re
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch

from tests.engine.given_weights import given
from tests.engine.kernels.cpu.test_grouped import FORMS, every_form
from weft.engine.families.experts import Gating
from weft.engine.kernels.cpu.layer_kernels import CpuKernels
from weft.engine.kernels.cpu.layers import TriedForms
from weft.engine.kernels.cpu.library import NativeLibrary
from weft.engine.kernels.cpu.packed import Form
from weft.engine.kernels.cpu.products import NativeExperts
from weft.engine.weights.groups import Groups
from weft.engine.weights.quantization import Quantization, Scheme
from weft.engine.weights.reader import ExpertsRef, WeightRef

BF16 = torch.bfloat16
FOUR_BITS = Quantization("gptq", "GPTQ", ((re.compile(""), Scheme(4, 32, has_zeros=True)),))


def draw(form: Form, num_outputs: int = 200, num_inputs: int = 288) -> Groups:
    """Scales of outputs differ a thousandfold, and one output is all zeros."""
    values = torch.randint(0, 1 << form.bits, (num_outputs, num_inputs), dtype=torch.uint8)
    groups, sizes = (num_outputs, num_inputs // form.group), torch.exp(torch.randn(num_outputs, 1) * 2 - 4)
    sizes[3] = 0
    zeros = torch.randint(-form.centre, form.centre, groups).float() if form.has_offset else None
    centred = (values.int() - form.centre).to(torch.int8)
    return Groups(centred, (torch.rand(groups) + 0.1) * sizes, zeros, form.bits, form.group)


class Broken:
    """A library of which one function does nothing."""

    def __init__(self, library: NativeLibrary, broken: str) -> None:
        self._library, self._broken = library, broken

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def function(self, name: str, *arguments: type) -> Callable[..., None]:
        if name != self._broken:
            return self._library.function(name, *arguments)

        def do_nothing(*given: int) -> None:
            if name == "weft_gather_rows_grouped":  # its memory is not cleared, and may still hold what is right
                *_, size, _, number, rows = given
                ctypes.memset(rows, 0, size * number * BF16.itemsize)

        return do_nothing


def broken(library: NativeLibrary, name: str = "weft_linear_grouped") -> NativeLibrary:
    return cast(NativeLibrary, Broken(library, name))


@every_form
def test_what_is_right_is_kept(library: NativeLibrary, form: Form) -> None:
    torch.manual_seed(0)
    forms = TriedForms(library)
    found = forms.rows_of(draw(form))
    assert found is not None and found[0] == form and not forms.is_wrong(form)


def test_what_is_rounded_on_purpose_counts_as_right(library: NativeLibrary) -> None:
    """Rows of NF4 whose values are small but for a few differ by more than the bound once these have 8 bits."""
    values = torch.full((80, 64), -0.0911)
    values[:, 0] = 1.0
    forms = TriedForms(library)
    found = forms.rows_of(Groups(values, torch.ones(80, 1), None, 4, 64))
    assert found is not None and not forms.is_wrong(found[0])


@pytest.mark.parametrize("name", ["weft_linear_grouped", "weft_gather_rows_grouped", "weft_pack_linear_grouped"])
def test_what_is_wrong_is_named(library: NativeLibrary, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing compared the kernels of packed weights at start-up."""
    torch.manual_seed(0)
    forms = TriedForms(broken(library, name))
    assert forms.rows_of(draw(Form(6, 16, True))) is None and forms.is_wrong(Form(6, 16, True))
    (record,) = caplog.records
    assert record.message.startswith("matrices of 6 bits in groups of 16 with offsets are kept in bfloat16: ")
    assert not forms.is_wrong(FORMS[0])


class Packed:
    """Hands out one matrix, in groups or plain, for everything."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups

    def groups(self, ref: WeightRef) -> Groups:
        return self._groups

    def bias_of(self, ref: WeightRef) -> None:
        return None

    def experts(self, ref: ExpertsRef) -> Iterator[tuple[torch.Tensor, None]]:
        return iter([(self._groups.dequantize(BF16), None)] * ref.num_experts)

    def expert_groups(self, ref: ExpertsRef) -> Iterator[tuple[Groups, None]]:
        return iter([(self._groups, None)] * ref.num_experts)


def test_a_matrix_of_a_wrong_form_is_kept_plain(library: NativeLibrary) -> None:
    torch.manual_seed(0)
    groups, ref, inputs = draw(Form(4, 32, True)), WeightRef(("m",), (200,), 288), torch.randn(3, 288).bfloat16()
    kernels, plain = CpuKernels(broken(library), quantization=FOUR_BITS), CpuKernels(library)
    assert kernels.linear_bytes(ref, BF16) < 0.4 * plain.linear_bytes(ref, BF16)
    linear = kernels.linear(ref, cast(Any, Packed(groups)))
    assert torch.equal(linear(inputs), plain.linear(*given(groups.dequantize(BF16)))(inputs))
    assert kernels.linear_bytes(ref, BF16) == plain.linear_bytes(ref, BF16)


def test_experts_of_a_wrong_form_are_kept_plain(library: NativeLibrary) -> None:
    torch.manual_seed(0)
    groups, ref = draw(Form(4, 32, True), 64, 64), ExpertsRef(WeightRef(("m",), (64,), 64), 2)
    kernels, plain = CpuKernels(broken(library), quantization=FOUR_BITS), CpuKernels(library)
    experts, right = (
        cast(NativeExperts, of.experts(ref, ref, cast(Any, Packed(groups)), Gating())) for of in (kernels, plain)
    )
    inputs = torch.randn(3, 64).bfloat16()
    assert torch.equal(experts.first(1, inputs), right.first(1, inputs))
    assert torch.equal(experts.second(1, inputs), right.second(1, inputs))
    assert kernels.experts_bytes(ref, ref, Gating(), BF16) == plain.experts_bytes(ref, ref, Gating(), BF16)
