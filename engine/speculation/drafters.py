"""Drafters that read a text: the caller's prediction, or the request's own tokens (prompt lookup)."""

from dataclasses import dataclass, field
from typing import Protocol

from weft.engine.speculation.lookup import Lookup, TokenHistory
from weft.engine.speculation.pace import MAX_NUM_DRAFTS, Pace


@dataclass(slots=True)
class Drafting:
    """What speculation keeps for one choice of a request; every choice starts anew.

    Attributes:
        drafter: The source of the drafts that are verified now; None before the first.
        pace: Learns from their verification; None for a drafter that never guesses wrong.
        lookups: The position of each drafter in the text that it reads.
    """

    drafter: object | None = None
    pace: Pace | None = None
    lookups: dict[object, Lookup] = field(default_factory=dict)


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
