import numpy as np
import torch

from weft.engine.device import Download, fill, pack, unpack


def test_what_is_packed_comes_out_again() -> None:
    tensors = [
        torch.rand(3),
        torch.arange(5),
        torch.empty(0),
        torch.rand(2, 7).t(),
        torch.arange(6).view(2, 3),
        torch.empty((4, 0), dtype=torch.int64),
        torch.arange(3, dtype=torch.uint8),
    ]
    packed = pack(tensors)
    assert packed.dtype == torch.uint8 and packed.ndim == 1
    unpacked = unpack(packed, tensors)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(unpacked, tensors, strict=True))
    assert torch.equal(pack(tensors[1:2]).view(torch.int64), tensors[1])


def test_on_the_host_nothing_moves() -> None:
    tensors = [torch.arange(3), torch.rand(2)]
    download = Download(tensors, torch.device("cpu"))
    assert [tensor.data_ptr() for tensor in download.wait()] == [tensor.data_ptr() for tensor in tensors]
    assert Download([], torch.device("cpu")).wait() == []


def test_filling_keeps_the_memory() -> None:
    target = torch.zeros(2, 3, dtype=torch.int64)
    address = target.data_ptr()
    fill(target, np.arange(6).reshape(2, 3))
    assert target.tolist() == [[0, 1, 2], [3, 4, 5]] and target.data_ptr() == address
