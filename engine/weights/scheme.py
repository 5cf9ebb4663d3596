"""How the matrices of a checkpoint are stored, as `quantization.py` reads it of a config.json. Imports no torch."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from weft.engine.shared.errors import ModelError


@dataclass(frozen=True, slots=True)
class Scheme:
    """How matrices are stored.

    Attributes:
        bits: Of a value; 16 for matrices that are not quantized.
        group_size: Inputs of an output that share a scale; None if all of them do, or in blocks.
        block: Outputs and inputs that share a scale; None if no two outputs do.
        is_float: Whether values are floating-point numbers.
        activation_bits: What the checkpoint was made for; Weft keeps activations in the model's dtype.
        has_zeros: Whether groups have zero points or offsets, too.
        is_scattered: Whether groups are of any inputs.
        has_table: Whether values are those of a table, which is of integers of 8 bits or is rounded to these.
        label: The format's own name for it, if it has one.
    """

    bits: int
    group_size: int | None = None
    block: tuple[int, int] | None = None
    is_float: bool = False
    activation_bits: int = 16
    has_zeros: bool = False
    is_scattered: bool = False
    has_table: bool = False
    label: str = ""

    @property
    def name(self) -> str:
        """Such as W4A16 or Q4_K."""
        return self.label or f"W{self.bits}A{self.activation_bits}{' in floating point' * self.is_float}"


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the matrices of a checkpoint are stored.

    Attributes:
        method: Which decoder reads them.
        name: Of the method, for the log.
        rules: Patterns of module names and the schemes of these; the first that fits counts.
        zeros_lack_one: Whether GPTQ's zero points are stored less one.
        plain: Patterns of names of modules that are not quantized, wherever they begin.
        has_kv_scales: Whether scales of K and V, where it has some, are for 8 bits.
    """

    method: str
    name: str
    rules: tuple[tuple[re.Pattern[str], Scheme], ...]
    zeros_lack_one: bool = False
    plain: tuple[re.Pattern[str], ...] = ()
    has_kv_scales: bool = True

    def expected(self, module: str) -> Scheme | None:
        """The scheme that config.json gives a module, None for none; what is stored may tell more."""
        if any(pattern.search(module) for pattern in self.plain):
            return None
        return next((scheme for pattern, scheme in self.rules if pattern.match(module)), None)

    def kept_schemes(self, names: Iterable[str], *, in_order: bool) -> list[Scheme]:
        """The schemes of matrices, or of experts, with these names; empty if one of them has to be kept plain.

        Args:
            in_order: Whether groups must be of neighbours: for a part of the inputs, and for experts, which all get the
                same ones.
        """
        found = [self.expected(name.format(0)) for name in names]
        schemes = [scheme for scheme in found if scheme and not (in_order and scheme.is_scattered)]
        return schemes if len(schemes) == len(found) else []

    def scheme(self, module: str) -> Scheme:
        """That of a module, which the checkpoint has quantized."""
        found = next((scheme for pattern, scheme in self.rules if pattern.match(module)), None)
        if found is None:
            raise ModelError(f"quantization_config: no group has {module} as a target, and its weight is quantized")
        return found

    @property
    def has_integers(self) -> bool:
        """Whether some matrices are stored as integers, or as floats of 4 bits, which are kept as integers."""
        return any(scheme.bits < (8 if scheme.is_float else 16) for _, scheme in self.rules)

    @property
    def rounds_tables(self) -> bool:
        """Whether matrices have values of a table that is not of integers."""
        return self.method == "bitsandbytes" and any(scheme.has_table for _, scheme in self.rules)

    @property
    def has_groups(self) -> bool:
        """Whether some matrices are stored in groups."""
        return any(scheme.bits < 16 for _, scheme in self.rules)

    @property
    def has_fp8_activations(self) -> bool:
        """Whether the checkpoint was made for products of fp8 matrices and activations in fp8."""
        return any(s.is_float and s.bits == s.activation_bits == 8 and s.group_size is None for _, s in self.rules)

    def __str__(self) -> str:
        return self.described("activations are not quantized")

    def described(self, activations: str) -> str:
        """For the log; activations is said of a checkpoint that was made for fewer bits of these."""
        schemes = [scheme for _, scheme in self.rules if scheme.bits < 16]
        are_made_for_fewer = any(scheme.activation_bits < 16 for scheme in schemes)
        names = " and ".join(dict.fromkeys(scheme.name for scheme in schemes)) or "plain values"
        return f"{names} ({self.name}{f'; {activations}' * are_made_for_fewer})"
