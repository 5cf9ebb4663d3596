"""Drafts of what an output will be: how long they are, where a text has them, and when their source pauses.

The texts are the caller's prediction and the request's own tokens (prompt lookup). Drafts grow with the rate at which
they are accepted, and shrink with what they cost. Drafts of models are made elsewhere, with the same `Pace` and
`DraftPause`.
"""

import logging
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

logger = logging.getLogger(__name__)

MAX_NUM_DRAFTS = 32
"""Longest draft. Longer ones are rarely accepted whole, and a step should stay short for the other requests in it."""

_FIRST_RATE, _FIRST_WEIGHT = 0.7, 2.0
"""The rate assumed at first, and how many tokens of experience that assumption counts for."""


class Pace:
    """Experience with one source of drafts. Drafts grow while they are accepted, and stop while they cost too much.

    A draft of k tokens adds the accepted ones to the one token that a step yields anyway. It makes the step longer by k
    times a *price*: the cost of one more token for every decoding request, as a fraction of a step. The engine's cost
    model gives the price. It is low while a step mostly waits for weights, and rises towards 1 as the batch grows. The
    rate of acceptance comes from recent drafts.
    """

    def __init__(self, forgetting: float = 0.8, recovery: float = 0.98) -> None:
        """Start with no experience.

        Args:
            forgetting: Weight of a draft one draft later.
            recovery: Weight of experience after each step without a draft, so that drafting is tried again later.
        """
        self._forgetting, self._recovery = forgetting, recovery
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
            self._num_accepted *= self._recovery
            self._num_tried *= self._recovery
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


_MAX_CANDIDATES = 16
"""Occurrences of a pair that are compared; a repetitive text has thousands."""

_MAX_MATCH = 16
"""Most ids of a match that are compared; a longer match says no more."""


class TokenHistory:
    """Token ids with an index of their pairs. May grow at its end, and may serve many lookups.

    Pairs are indexed at the first search and as the text grows, so a step costs no more for a long text.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = token_ids
        self._ends: dict[tuple[int, int], list[int]] = {}
        self._num_indexed = 1

    def ends(self, first: int, second: int) -> list[int]:
        """Positions right behind each occurrence of a pair, ascending, without the end of the text."""
        end = len(self.token_ids) - 1
        if self._num_indexed < end:
            start = self._num_indexed - 1
            pairs = zip(self.token_ids[start : end - 1], self.token_ids[start + 1 : end], strict=True)
            for position, pair in enumerate(pairs, start + 2):
                self._ends.setdefault(pair, []).append(position)
            self._num_indexed = end
        return self._ends.get((first, second), [])


class Lookup:
    """Follows one output through a text.

    Keeps a pointer into the text and advances it while the output equals the text. When they differ, it searches the
    text for the longest n-gram (n >= 2) that the output ends with, and continues behind it. Places behind the lost
    pointer go first; of equal matches the nearest wins.
    """

    def __init__(self, text: TokenHistory, num_tokens: int, pointer: int | None) -> None:
        """Start behind the first num_tokens ids of the request.

        Args:
            text: Where to search; for prompt lookup the ids of the request itself.
            pointer: Where in the text the output should begin; None if that must be searched.
        """
        self.pace = Pace()
        self._text = text
        self._num_followed = num_tokens
        self._pointer = pointer
        self._lost_at = num_tokens if pointer is None else pointer

    def propose(self, token_ids: Sequence[int], most: int) -> list[int]:
        """Up to `most` ids that may follow token_ids, those of the request; empty if the text has no match."""
        self._follow(token_ids)
        if self._pointer is None:
            self._pointer = self._find(token_ids)
        text = self._text.token_ids
        if self._pointer is None or self._pointer >= len(text):
            return []
        draft = list(text[self._pointer : self._pointer + most])
        if text is token_ids:  # the text continues with the draft itself, so a short loop gives a long draft
            period = len(text) - self._pointer
            while len(draft) < most:
                draft.append(draft[-period])
        return draft

    def _follow(self, token_ids: Sequence[int]) -> None:
        """Advance the pointer over the new ids; it becomes None where they differ."""
        text = self._text.token_ids
        for position in range(self._num_followed, len(token_ids)):
            if self._pointer is None:
                break
            if self._pointer < len(text) and text[self._pointer] == token_ids[position]:
                self._pointer += 1
            else:
                self._lost_at = self._pointer
                self._pointer = None
        self._num_followed = len(token_ids)

    def _find(self, token_ids: Sequence[int]) -> int | None:
        if len(token_ids) < 2:
            return None
        ends = self._text.ends(token_ids[-2], token_ids[-1])
        middle = bisect_left(ends, self._lost_at)
        nearest = ends[middle : middle + _MAX_CANDIDATES] or ends[max(0, middle - _MAX_CANDIDATES) : middle][::-1]
        return max(nearest, key=lambda end: self._num_equal(end, token_ids), default=None)

    def _num_equal(self, end: int, token_ids: Sequence[int]) -> int:
        """How many ids before `end` in the text equal the last ids of the output; at most _MAX_MATCH."""
        most = min(end, len(token_ids), _MAX_MATCH)
        text = self._text.token_ids
        return next((n for n in range(2, most) if text[end - 1 - n] != token_ids[-1 - n]), most)


@dataclass(slots=True)
class Drafting:
    """What speculation keeps for one choice of a request; every choice starts anew.

    Attributes:
        drafter: The source of the drafts that are verified now; None before the first.
        pace: Learns from their verification; None for a drafter that never guesses wrong.
        lookups: The position of each drafter in the text that it reads.
        num_right: The request's number of preemptions, and how many of its tokens the cache of a draft model holds at
            least until the next one.
    """

    drafter: object | None = None
    pace: Pace | None = None
    lookups: dict[object, Lookup] = field(default_factory=dict)
    num_right: tuple[int, int] = (0, 0)


class DraftedRequest(Protocol):
    """What these drafters read of a request; see `weft.engine.request.Request`."""

    token_ids: list[int]
    prediction: TokenHistory | None
    drafting: Drafting

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens given."""


class PredictionDrafter:
    """Proposes what comes next in the prediction of a request (`Guidance.prediction_token_ids`), if it has one."""

    def propose(self, request: DraftedRequest) -> list[int]:
        """Ids of the prediction, which is assumed to begin where the output begins."""
        if request.prediction is None:
            return []
        lookup = request.drafting.lookups.get(self)
        if lookup is None:
            lookup = request.drafting.lookups[self] = Lookup(request.prediction, request.num_prompt_tokens, 0)
        return lookup.propose(request.token_ids, MAX_NUM_DRAFTS)


class NgramDrafter:
    """Proposes what followed the last ids where they occurred before (`--speculative ngram`)."""

    def propose(self, request: DraftedRequest) -> list[int]:
        """Ids of the prompt or of the output so far."""
        lookup = request.drafting.lookups.get(self)
        if lookup is None:
            text = TokenHistory(request.token_ids)
            lookup = request.drafting.lookups[self] = Lookup(text, len(request.token_ids), None)
        return lookup.propose(request.token_ids, MAX_NUM_DRAFTS)


FIRST_PAUSE, LONGEST_PAUSE = 64, 1 << 14
"""Steps without drafts after the first failure, and after many."""


class DraftPause:
    """The pauses of one source of drafts after failures, such as missing memory; the speculator reports how steps went.

    Each failure doubles the next pause. As many good steps as the last pause had halve it again.
    """

    def __init__(self, name: str) -> None:
        """Start without a pause; the log uses the name."""
        self._name = name
        self._next = FIRST_PAUSE
        self._num_skipped = 0
        self._num_good = 0

    def is_on(self) -> bool:
        """Whether the source is left out in this step; counts the step."""
        if not self._num_skipped:
            return False
        self._num_skipped -= 1
        return True

    def begin(self) -> None:
        """Leave the source out from now on. Called where its exception is handled, which is logged."""
        logger.exception("%s failed; the next %d steps go without", self._name, self._next)
        self._num_skipped, self._num_good = self._next, 0
        self._next = min(2 * self._next, LONGEST_PAUSE)

    def observe_success(self) -> None:
        """Count a step in which the source did not fail."""
        self._num_good += 1
        if 2 * self._num_good >= self._next > FIRST_PAUSE:
            self._next //= 2
            self._num_good = 0
