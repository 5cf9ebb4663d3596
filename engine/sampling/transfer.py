"""Host arrays to the device, without waiting for it."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def to_device(
    array: npt.NDArray[np.int64] | npt.NDArray[np.float32] | npt.NDArray[np.uint8], device: torch.device
) -> Tensor:
    """The array as a tensor on the device. On the CPU it shares the array's memory: read it only."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)  # from pageable memory the host would wait
    return tensor.to(device)
