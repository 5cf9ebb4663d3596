"""Programmatic dependent launch: a kernel starts while the one before it on the stream still runs.

Compute capability 9.0 has it. Without it, each of the ten kernels of a layer waits until the one before has left the
GPU, and no memory is read meanwhile. Two instructions govern it:

- `let_next_start`: the next kernel may start once every program of this one has said so, or has ended. All programs
  run by then, so the next kernel takes no place from them. It is right to say so at once.
- `wait_for_previous`: waits until the kernel before has ended and its writes are visible. A kernel that was launched
  in the ordinary way, such as torch's and cuBLAS's, starts only then, and ends likewise.

What keeps it right, for kernels A, B, C in stream order:

1. Every program waits, even one without work, and before it ends. So B ends after A has ended, and who waits for B has
   waited for A, too: the order of the stream holds for all that comes after the wait, at any distance.
2. Read after write: what an earlier kernel writes is read after the wait. Only weights are read before it. They are
   there before the step, and a step begins with ordinary kernels, which have waited for all before them.
3. Write after read: nothing is written before the wait. So C may write what A reads, be it the residual or memory that
   the allocator has taken from A's tensors and given to C.

The kernels of a CUDA graph that is recorded from such launches depend on each other in the same way.
"""

from typing import TypedDict

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_CAPABILITY = 9, 0


class LaunchOptions(TypedDict, total=False):
    """Arguments of a launch: IS_DEPENDENT of the kernel, and the attribute, which Triton's interpreter refuses."""

    IS_DEPENDENT: bool
    launch_pdl: bool


def supports_dependent_launch(device: torch.device) -> bool:
    """Whether kernels on this device may be launched so."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _CAPABILITY


def launch_options(is_dependent: bool) -> LaunchOptions:
    """What to pass to a kernel that can be launched so."""
    return {"IS_DEPENDENT": True, "launch_pdl": True} if is_dependent else {"IS_DEPENDENT": False}


@triton.jit
def let_next_start(IS_DEPENDENT: tl.constexpr):
    """Let the next kernel start. Without IS_DEPENDENT nothing happens."""
    if IS_DEPENDENT:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(IS_DEPENDENT: tl.constexpr):
    """Wait for all earlier kernels. Without IS_DEPENDENT nothing happens."""
    if IS_DEPENDENT:
        gdc_wait()


@triton.jit
def follow(IS_DEPENDENT: tl.constexpr):
    """Let the next kernel start, then wait for the earlier ones: the begin of a kernel that can load nothing before."""
    let_next_start(IS_DEPENDENT)
    wait_for_previous(IS_DEPENDENT)
