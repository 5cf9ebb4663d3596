"""Reads machine code with the tools that Triton bundles: resources, instructions, and the loop that does the work."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton

from tests.fake_gpu.driver import Variant

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)(.*)")
_LABEL = re.compile(r"^(\.L_x_\d+):")
_LOADS = r"LDGSTS|LDG|UTMALDG|UBLKCP"

REGISTERS = 1 << 16
SHARED_BYTES = 228 << 10
NUM_THREADS = 2048
"""What a multiprocessor of an H100 has."""

_RESERVED_BYTES = 1 << 10  # of shared memory, for every program
_REGISTER_UNIT = 256  # a warp gets registers in such numbers


@dataclass(frozen=True, slots=True)
class MachineCode:
    """A compiled kernel.

    Attributes:
        registers: Of a thread.
        local_bytes: Memory of a thread for what did not fit in registers.
        shared_bytes: Of a program.
        instructions: Names, such as LDG.E.128, in order.
        loop: The instructions of the innermost loop that loads most; all if none loads.
    """

    registers: int
    local_bytes: int
    shared_bytes: int
    num_warps: int
    instructions: tuple[str, ...]
    loop: range

    def count(self, pattern: str) -> int:
        """Instructions whose names begin with a pattern."""
        return sum(re.match(pattern, name) is not None for name in self.instructions)

    @property
    def num_programs(self) -> int:
        """Programs that a multiprocessor holds at a time."""
        of_a_warp = -(-32 * self.registers // _REGISTER_UNIT) * _REGISTER_UNIT
        by_registers = REGISTERS // of_a_warp // self.num_warps
        by_memory = SHARED_BYTES // (self.shared_bytes + _RESERVED_BYTES)
        return min(by_registers, by_memory, NUM_THREADS // (32 * self.num_warps))


def read(variant: Variant) -> MachineCode:
    """Disassemble a compiled variant."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(variant.compiled.asm["cubin"])
        file.flush()
        usage = _run("cuobjdump", "--dump-resource-usage", file.name)
        lines = _run("nvdisasm", "-c", file.name).splitlines()
    resources = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    instructions, loop = _parse(lines)
    local_bytes = resources["STACK"] + resources["LOCAL"]
    shared_bytes = variant.compiled.metadata.shared
    return MachineCode(resources["REG"], local_bytes, shared_bytes, variant.options["num_warps"], instructions, loop)


def _run(tool: str, *arguments: str) -> str:
    return subprocess.run([_TOOLS / tool, *arguments], capture_output=True, text=True, check=True).stdout


def _parse(lines: list[str]) -> tuple[tuple[str, ...], range]:
    instructions: list[str] = []
    labels: dict[str, int] = {}
    loops: list[range] = []
    for line in lines:
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif found := _INSTRUCTION.search(line):
            target = re.search(r"\.L_x_\d+", found[2])
            if found[1] == "BRA" and target and labels.get(target[0], len(instructions)) < len(instructions):
                loops.append(range(labels[target[0]], len(instructions) + 1))
            instructions.append(found[1])

    def num_loads(loop: range) -> int:
        return sum(re.match(_LOADS, instructions[at]) is not None for at in loop)

    innermost = [loop for loop in loops if not any(a != loop and a[0] >= loop[0] and a[-1] <= loop[-1] for a in loops)]
    # Of two that load as much, the shorter one runs more often: the other one masks.
    best = max(innermost, key=lambda loop: (num_loads(loop), -len(loop)), default=range(0))
    return tuple(instructions), best if num_loads(best) else range(len(instructions))
