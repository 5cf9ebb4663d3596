from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from safetensors.torch import save_file

from weft.engine.weights.tensor_files import CheckpointSource, PinnedUpload

CPU = torch.device("cpu")


class FakeEvent:
    """Notes whether somebody waited since the last copy."""

    is_busy = False
    num_copies = 0

    def record(self) -> None:
        assert not self.is_busy, "a buffer was filled while the device may have been reading it"
        self.is_busy = True
        self.num_copies += 1

    def synchronize(self) -> None:
        self.is_busy = False


def make_uploader() -> tuple[PinnedUpload, list[FakeEvent]]:
    events: list[FakeEvent] = []

    def make_event() -> FakeEvent:
        events.append(FakeEvent())
        return events[-1]

    return PinnedUpload(CPU, buffer_bytes=64, make_event=make_event), events


@pytest.mark.parametrize("shape", [(5,), (16,), (17,), (3, 40), (7, 1, 9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_tensors_of_any_size_arrive_in_the_dtype_asked_for(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    uploader, _ = make_uploader()
    whole = torch.zeros(shape[0] + 2, *shape[1:], dtype=torch.float32)
    for _ in range(3):
        source = torch.randn(shape).to(dtype)
        uploader.copy(source, whole[1:-1])
        assert torch.equal(whole[1:-1], source.float())
    assert not whole[0].any() and not whole[-1].any()


def test_buffers_take_turns_and_none_is_filled_before_it_is_free() -> None:
    uploader, events = make_uploader()
    uploader.copy(torch.arange(80), torch.empty(80, dtype=torch.int64))  # ten parts
    assert [event.num_copies for event in events] == [4, 3, 3]


def test_what_stays_in_host_memory_is_not_uploaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a pinned buffer it would be copied twice."""
    save_file({"weight": torch.arange(6.0)}, tmp_path / "model.safetensors")
    uploads: list[str] = []
    source, target = CheckpointSource(tmp_path, CPU), torch.empty(6)
    uploader = SimpleNamespace(copy=lambda stored, target: uploads.append(target.device.type))
    monkeypatch.setattr(source, "_upload", uploader)
    source.fill("weight", target)
    assert torch.equal(target, torch.arange(6.0)) and uploads == []
    on_device = SimpleNamespace(is_cuda=True, shape=target.shape, device=torch.device("cuda"))
    source.fill("weight", cast(torch.Tensor, on_device))
    assert uploads == ["cuda"]
