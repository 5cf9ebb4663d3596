"""Runs a long call in slices: in a thread of its own, which goes on only while its owner waits for it.

On a CPU an encoder may take seconds for one picture, and streams must not pause for so long. So its modules ask between
each other whether the slice is over (`pause`), and the engine computes a step before the next one.
"""

import threading
import time
from collections.abc import Callable
from typing import Final, Generic, TypeVar

import torch

SLICE_S: Final = 0.1
"""Of a call, between two steps; longer by what one module takes."""

T = TypeVar("T")
_OF_THREAD = threading.local()


class Slices(Generic[T]):
    """One call. What it raises, `result` raises.

    Attributes:
        seconds: That it has run for.
    """

    def __init__(self, call: Callable[[], T], num_threads: int) -> None:
        """Begin nothing yet; num_threads are torch's for this call."""
        self._call, self._num_threads = call, num_threads
        self._found: list[T] = []
        self._error: BaseException | None = None
        self._may_go, self._has_stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._until = self.seconds = 0.0
        self._thread = threading.Thread(target=self._run, name="weft-encoder", daemon=True)

    def go_on(self, seconds: float = SLICE_S) -> bool:
        """Run for about so long; whether the call has ended."""
        began = time.perf_counter()
        self._until = began + seconds
        if self._thread.ident is None:
            self._thread.start()
        self._may_go.release()
        self._has_stopped.acquire()
        self.seconds += time.perf_counter() - began
        return bool(self._found) or self._error is not None

    def result(self) -> T:
        """What the call returned; it has ended."""
        if self._error is not None:
            raise self._error
        return self._found[0]

    def _run(self) -> None:
        self._may_go.acquire()
        _OF_THREAD.slices = self
        torch.set_num_threads(self._num_threads)
        try:
            with torch.inference_mode():
                self._found.append(self._call())
        except BaseException as error:  # for `result`
            self._error = error
        self._has_stopped.release()

    def stop_if_over(self) -> None:
        """Called by the thread: wait for the next slice if this one is over."""
        if time.perf_counter() >= self._until:
            self._has_stopped.release()
            self._may_go.acquire()


def pause(*_: object) -> None:
    """A place where the call of this thread may stop, if it is one in slices. A hook of modules."""
    slices: Slices[object] | None = getattr(_OF_THREAD, "slices", None)
    if slices is not None:
        slices.stop_if_over()


def may_pause(module: torch.nn.Module) -> None:
    """Let calls stop before each layer of a module, and before each part of a layer."""
    for layers in module.modules():
        if isinstance(layers, torch.nn.ModuleList):
            for layer in layers:
                for part in (layer, *layer.children()):
                    part.register_forward_pre_hook(pause)
