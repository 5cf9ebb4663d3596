"""What a draft costs; `test_engine.py` and the tests of the drafters run the rest."""

import pytest

from tests.engine.requests_for_tests import PerToken
from weft.engine.schedule.speculator import price_of_drafts
from weft.engine.schedule.step_cost import StepCostModel


def test_the_price_rises_with_the_batch() -> None:
    """Where every token takes a millisecond and nothing else does, a draft costs as much as the token it may save."""
    assert price_of_drafts(PerToken(), [5, 900]) == (pytest.approx(1.0), pytest.approx(2e-3))

    class Waits(PerToken):
        def predict(self, load: object) -> float:
            return 0.045 + super().predict(load)  # type: ignore[arg-type]

    prices = [price_of_drafts(Waits(), [10] * n)[0] for n in (1, 8, 64)]
    assert prices == pytest.approx([1 / 46, 8 / 53, 64 / 109])


def test_before_anything_is_measured_a_draft_is_cheap() -> None:
    price, seconds = price_of_drafts(StepCostModel(), [1])
    assert 0 < price < 0.1
    assert seconds == 0
