"""How many tokens to draft: what the next ones are likely to bring against what they cost.

A draft of k tokens brings the accepted ones on top of the one token that a step brings anyway, and makes the step
longer by k times a *price*: what one more token for every decoding request costs, in steps. The price comes from the
cost model of the engine, so it is low while a step mostly waits for weights and rises towards 1 as the batch grows;
the rate of acceptance is what recent drafts have shown. Nothing here knows requests.
"""

from collections.abc import Iterable

from weft.engine.core.step_cost import StepCostModel, StepLoad

MAX_NUM_DRAFTS = 32
"""Longest draft: more is rarely accepted, and a step should stay short for the others in it."""

_LEAST_PRICE = 0.02
"""Rows cost the host something even where the device computes them for nothing."""

_FIRST_RATE, _FIRST_WEIGHT = 0.7, 2.0
"""The rate that is assumed before anything is known, and how many tokens of experience it counts for."""

_RECOVERY = 0.98
"""What is left of bad experience after each step without a draft, so that drafts are tried again at last."""


class Pace:
    """Experience with one source of drafts. Grows bold while drafts are accepted; pauses while they cost too much."""

    def __init__(self, forgetting: float = 0.8) -> None:
        """Start with no experience; `forgetting` is what a draft still counts for one draft later."""
        self._forgetting = forgetting
        self._num_accepted = 0.0
        self._num_tried = 0.0

    @property
    def rate(self) -> float:
        """Estimated probability that a drafted token is accepted if all before it are."""
        return (self._num_accepted + _FIRST_RATE * _FIRST_WEIGHT) / (self._num_tried + _FIRST_WEIGHT)

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        """Learn from a draft. Behind the first token that was not accepted nothing was tried."""
        self._num_accepted = self._num_accepted * self._forgetting + num_accepted
        self._num_tried = self._num_tried * self._forgetting + num_accepted + (num_accepted < num_drafts)

    def num_drafts(self, price: float) -> int:
        """Tokens to draft at that price; 0 is a pause, which slowly forgets why."""
        number = best_num_drafts(self.rate, price)
        if not number:
            self._num_accepted *= _RECOVERY
            self._num_tried *= _RECOVERY
        return number


def best_num_drafts(rate: float, price: float) -> int:
    """The length of a draft that gives most tokens a second: (1 + rate + rate^2 ...) / (1 + length * price)."""
    num_tokens = probability = best_speed = 1.0
    for length in range(1, MAX_NUM_DRAFTS + 1):
        probability *= rate
        num_tokens += probability
        speed = num_tokens / (1.0 + length * price)
        if speed <= best_speed:
            return length - 1
        best_speed = speed
    return MAX_NUM_DRAFTS


def price_of_drafts(cost: StepCostModel, contexts: Iterable[int]) -> tuple[float, float]:
    """What one more token for each decoding request costs.

    Args:
        contexts: Computed tokens of each request that decodes.

    Returns:
        The price, as a part of the step that computes one token for each, and the seconds of that step (0 before
        anything was measured).
    """
    plain, longer = StepLoad(), StepLoad()
    for context in contexts:
        plain.add(1, context)
        longer.add(2, context)
    seconds = cost.predict(plain)
    price = cost.predict(longer) / seconds - 1.0 if seconds else 0.0
    return max(price, _LEAST_PRICE), seconds
