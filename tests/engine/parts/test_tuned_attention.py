import math

import torch

from weft.engine.parts.attention import TemperatureTable


def test_temperatures_rise_at_the_end_of_each_period() -> None:
    table = TemperatureTable(0.5, period=4, offset=1, max_model_len=12, device=torch.device("cpu"))
    rows = table.gather(torch.tensor([0, 2, 3, 6, 7, 11]))
    periods = [0, 0, 1, 1, 2, 3]
    torch.testing.assert_close(rows, torch.tensor([[1 + 0.5 * math.log(1 + count)] for count in periods]))
