"""A call in slices computes the same, and stops only between the parts of a layer."""

import threading
import time

import pytest
import torch

from weft.engine.vision.slices import Slices, may_pause, pause


class Layer(torch.nn.Module):
    def __init__(self, number: int, seen: list[int]) -> None:
        super().__init__()
        self.part, self._number, self._seen = torch.nn.Linear(4, 4), number, seen

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self._seen.append(self._number)
        time.sleep(0.01)
        found: torch.Tensor = self.part(hidden)
        return found


class Encoder(torch.nn.Module):
    def __init__(self, seen: list[int]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(i, seen) for i in range(6))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def test_a_call_stops_between_layers_and_returns_the_same() -> None:
    seen: list[int] = []
    encoder = Encoder(seen)
    may_pause(encoder)
    given = torch.randn(3, 4)
    wanted = encoder(given)  # in no slices: `pause` does nothing
    seen.clear()
    slices, numbers = Slices(lambda: encoder(given), 1), list[int]()
    while not slices.go_on(0.005):
        numbers.append(len(seen))
        time.sleep(0.01)
        assert len(seen) == numbers[-1], "it went on without its owner"
    assert numbers == sorted(numbers) and len(set(numbers)) >= 5
    assert torch.equal(slices.result(), wanted)
    assert slices.seconds >= 0.06


def test_a_fault_is_raised_by_the_result_alone() -> None:
    def broken() -> None:
        pause()
        raise ValueError("no picture")

    slices = Slices(broken, 1)
    while not slices.go_on(0.0):
        pass
    with pytest.raises(ValueError, match="no picture"):
        slices.result()


def test_a_call_that_nobody_goes_on_with_ends_with_its_process() -> None:
    slices = Slices(pause, 1)
    assert not slices.go_on(0.0)
    (thread,) = (each for each in threading.enumerate() if each.name == "weft-encoder")
    assert thread.daemon
    assert slices.go_on()
