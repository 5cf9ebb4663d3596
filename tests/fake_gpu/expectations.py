"""What the machine code of each kernel should be on a Hopper GPU, and how many bytes its work moves.

A kernel that the engine launches must have a line. Bytes are those of one pass of its main loop, or of one program
where there is no loop over memory. The table beside instructions shows how far a kernel is from the rate at which an
H100 starts instructions: above that rate memory waits for the kernel.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.fake_gpu.driver import Variant
from tests.fake_gpu.machine_code import MachineCode

MOST_INSTRUCTIONS_PER_BYTE = 132 * 4 * 1.755e9 / 3.35e12
"""Of warps, at which an H100 is bound by both: its schedulers times their clock, by the bandwidth of its memory."""

HMMA, HGMMA = "HMMA", "HGMMA"  # tensor cores, by warp and by group of four warps
ASYNC, WIDE = r"LDGSTS\S*\.128", r"LDG\S*\.128"  # 128 bits at a time, to shared memory and to registers

Constants = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Expected:
    """One line of the table.

    Attributes:
        kernel: The function's name.
        where: Constants of the variants that it is about.
        copies: Instructions that load most of the data, WIDE or ASYNC; None where loads are few.
        matrix: Instructions that multiply matrices; None if it has none.
        num_programs: At least so many share a multiprocessor.
        num_bytes: Constants -> bytes; None where bytes are not what bounds it.
        counted: Instructions in its code for each that a program starts on average, since it counts all branches.
    """

    kernel: str
    where: Constants = field(default_factory=dict)
    copies: str | None = WIDE
    matrix: str | None = None
    num_programs: int = 2
    num_bytes: Callable[[Constants], int] | None = None
    counted: float = 1.0

    def fits(self, variant: Variant) -> bool:
        return variant.name == self.kernel and self.where.items() <= variant.constants.items()


def _tile(constants: Constants) -> int:
    """Keys and values of a tile, in two bytes each."""
    return int(2 * constants["TILE_KEYS"] * constants["HEAD_DIM"] * 2)


def _weights(constants: Constants) -> int:
    """A tile of weights, in two bytes each."""
    return int(2 * constants["OUTS"] * constants["BLOCK"])


EXPECTED = (
    Expected("attend_kernel", {"IS_UNIFORM": True, "TILE_ROWS": 16}, ASYNC, HMMA, 2, _tile),
    Expected("attend_kernel", {"IS_UNIFORM": True, "TILE_ROWS": 64}, ASYNC, HGMMA, 2, _tile),
    Expected("attend_kernel", {"IS_UNIFORM": False}, ASYNC, HGMMA, 1, _tile),
    Expected("merge_kernel", num_programs=8, num_bytes=lambda c: c["TILE_PARTS"] * c["HEAD_DIM"] * 4),
    Expected("rms_norm", num_programs=4, num_bytes=lambda c: 2 * 2 * c["BLOCK"]),
    Expected("prepare_heads", num_programs=8, num_bytes=lambda c: 2 * 2 * c["HEADS"] * c["HEAD_DIM"]),
    Expected("activate", num_programs=8, num_bytes=lambda c: 3 * 2 * c["BLOCK"]),
    Expected("summarise", num_programs=3, num_bytes=lambda c: 4 * c["PART"], counted=1.25),  # masked rows, and drawn
    Expected("collect"),  # most programs end early
    Expected("decide"),
    Expected("draw", num_programs=1),  # one a row, of what others have left
    Expected("penalise", copies=None),
    Expected("narrow"),
    # Two programs have 32 kB of weights on their way, and memory needs 20 kB of each multiprocessor.
    Expected("multiply", {"USES_DOT": False}, WIDE, num_bytes=_weights),
    Expected("multiply", {"USES_DOT": True}, WIDE, HMMA, num_bytes=_weights),
)


def expected_of(variant: Variant) -> Expected:
    """The line for a variant; none, or two, is a mistake in the table."""
    lines = [line for line in EXPECTED if line.fits(variant)]
    assert len(lines) == 1, f"{len(lines)} lines expect something of {variant}"
    return lines[0]


def instructions_per_byte(expected: Expected, variant: Variant, code: MachineCode) -> float | None:
    """Of all warps of a program; None where bytes are not what bounds it."""
    if expected.num_bytes is None:
        return None
    return len(code.loop) * code.num_warps / expected.num_bytes(variant.constants)


def claims(expected: Expected, variant: Variant, code: MachineCode) -> dict[str, bool]:
    """What should be so, and whether it is."""
    rate, most = instructions_per_byte(expected, variant, code), expected.counted * MOST_INSTRUCTIONS_PER_BYTE
    ahead = (variant.options["num_stages"] - 1) * _tile(variant.constants) if expected.copies == ASYNC else 0
    return {
        "needs no local memory": code.local_bytes == 0 and code.count("LDL|STL") == 0,
        f"uses {expected.matrix}": expected.matrix is None or code.count(expected.matrix) > 0,
        f"loads by {expected.copies}": expected.copies is None or code.count(expected.copies) > 0,
        f"has room for {ahead} bytes of tiles on their way": code.shared_bytes >= ahead,
        f"has {expected.num_programs} programs a multiprocessor": code.num_programs >= expected.num_programs,
        "starts fewer instructions than bounds it": rate is None or rate < most,
    }
