"""How many tokens to draft, from the rate at which drafts are accepted and what they cost.

A draft of k tokens adds the accepted ones to the one token that a step yields anyway. It makes the step longer by k
times a *price*: the cost of one more token for every decoding request, as a fraction of a step. The engine's cost model
gives the price. It is low while a step mostly waits for weights, and rises towards 1 as the batch grows. The rate comes
from recent drafts. Nothing here knows requests.
"""

MAX_NUM_DRAFTS = 32
"""Longest draft. Longer ones are rarely accepted whole, and a step should stay short for the other requests in it."""

_FIRST_RATE, _FIRST_WEIGHT = 0.7, 2.0
"""The rate assumed at first, and how many tokens of experience that assumption counts for."""

_RECOVERY = 0.98
"""Weight of experience after each step without a draft, so that drafting is tried again later."""


class Pace:
    """Experience with one source of drafts. Drafts grow while they are accepted, and stop while they cost too much."""

    def __init__(self, forgetting: float = 0.8) -> None:
        """Start with no experience; `forgetting` is the weight of a draft one draft later."""
        self._forgetting = forgetting
        self._num_accepted = 0.0
        self._num_tried = 0.0

    @property
    def rate(self) -> float:
        """Estimated probability that a drafted token is accepted if all before it are."""
        return (self._num_accepted + _FIRST_RATE * _FIRST_WEIGHT) / (self._num_tried + _FIRST_WEIGHT)

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        """Learn from a draft. Tokens behind the first refused one were not tried."""
        self._num_accepted = self._num_accepted * self._forgetting + num_accepted
        self._num_tried = self._num_tried * self._forgetting + num_accepted + (num_accepted < num_drafts)

    def num_drafts(self, price: float) -> int:
        """Tokens to draft at this price. Each 0 fades experience a little, so that drafting resumes later."""
        number = best_num_drafts(self.rate, price)
        if not number:
            self._num_accepted *= _RECOVERY
            self._num_tried *= _RECOVERY
        return number


def best_num_drafts(rate: float, price: float) -> int:
    """The length of a draft that maximises tokens a second: (1 + rate + rate^2 ...) / (1 + length * price)."""
    num_tokens = probability = best_speed = 1.0
    for length in range(1, MAX_NUM_DRAFTS + 1):
        probability *= rate
        num_tokens += probability
        speed = num_tokens / (1.0 + length * price)
        if speed <= best_speed:
            return length - 1
        best_speed = speed
    return MAX_NUM_DRAFTS
