"""Which layers' experts leave a device for the host's memory, and whether they fit there, as arithmetic.

Experts are most of the weights of a mixture, and a token reads few of them: of all weights they are the ones that can
best be computed where memory is slow. They move layer by layer, from the first layer on that has any. Allocates
nothing, and knows no model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from weft.engine.wire.errors import ModelError
from weft.engine.wire.machine import format_size


@dataclass(frozen=True, slots=True)
class HostShare:
    """What stays in host memory of a model on another device.

    Attributes:
        num_layers: Layers whose experts these are, the first that have any; 0 for none.
        num_all: All layers that have experts.
        num_bytes: What they take of the host's memory.
        kernels: Name of what computes them.
    """

    num_layers: int = 0
    num_all: int = 0
    num_bytes: int = 0
    kernels: str = ""

    @property
    def whose(self) -> str:
        """Whose experts they are, for a message."""
        return f"the experts of {self.num_layers} of {self.num_all} mixture layers"

    @property
    def line(self) -> str:
        """The share as a printable line."""
        return f"host memory  {format_size(self.num_bytes)} for {self.whose}, computed by the CPU: {self.kernels}"

    def check(self, free_bytes: int) -> None:
        """Refuse experts that take more than the free_bytes of the host.

        Raises:
            ModelError: With both numbers.
        """
        if self.num_bytes > max(free_bytes, 0):
            taken, free = format_size(self.num_bytes), format_size(max(free_bytes, 0))
            raise ModelError(f"{self.whose} would take {taken} of host memory, of which only {free} are free")


ALL_ON_DEVICE = HostShare()


def num_layers_to_move(needed_bytes: int, free_bytes: int, experts_bytes: Sequence[int]) -> int:
    """The fewest first layers whose experts must leave a device so that the rest fits; all, if not even that helps.

    Args:
        needed_bytes: Of the whole model on the device: weights, activations and a KV cache.
        free_bytes: Of the device.
        experts_bytes: What the experts of each layer that has some take on the device.
    """
    number = 0
    while needed_bytes > free_bytes and number < len(experts_bytes):
        needed_bytes -= experts_bytes[number]
        number += 1
    return number
