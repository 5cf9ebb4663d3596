from collections.abc import Callable

import pytest
import torch

from weft.engine.families.experts import TopK
from weft.engine.layers.feed_forward import choose, sigmoid, softplus


@pytest.mark.parametrize(("own", "torchs"), [(sigmoid, torch.sigmoid), (softplus, torch.nn.functional.softplus)])
def test_a_result_does_not_depend_on_where_its_value_lies(
    own: Callable[[torch.Tensor], torch.Tensor], torchs: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Torch rounds what its vectors leave over in another way, so that shares of experts hung on other rows."""
    values = 4 * torch.randn(777, generator=torch.Generator().manual_seed(0))
    alone = torch.cat([own(value) for value in values.split(1)])
    for size in (3, 16, 31, 72, 777):
        assert torch.equal(torch.cat([own(part) for part in values.split(size)]), alone)
    wide = torch.cat((values, torch.tensor([-200.0, -90.0, 0.0, 19.9, 20.1, 90.0, 200.0])))
    torch.testing.assert_close(own(wide), torchs(wide))


@pytest.mark.parametrize("num_experts", [8, 60, 72])
def test_shares_of_a_token_are_the_same_alone(num_experts: int) -> None:
    logits = torch.randn(200, num_experts, generator=torch.Generator().manual_seed(0))
    routing = TopK(4, scores="sigmoid", divides=True)
    alone = torch.cat([choose(routing, row, None)[1] for row in logits.split(1)])
    assert torch.equal(choose(routing, logits, None)[1], alone)
