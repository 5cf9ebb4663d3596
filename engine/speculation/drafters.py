"""Drafters that need no model: what has to follow, what the caller expects, and what was said before."""

from typing import TYPE_CHECKING

from weft.engine.guidance.certain import needs_rows
from weft.engine.speculation.lookup import Lookup, Text
from weft.engine.speculation.pace import MAX_NUM_DRAFTS

if TYPE_CHECKING:
    from weft.engine.core.request import Request


class ForcedTokens:
    """Proposes what a grammar leaves no choice about, to requests that need a row for each id all the same.

    For the others such ids are no guesses: they have them already (`weft.engine.guidance.certain`).
    """

    def propose(self, request: "Request") -> list[int]:
        """Return forced ids behind the known output."""
        if request.grammar is None or not needs_rows(request):
            return []
        return request.grammar.forced_token_ids(MAX_NUM_DRAFTS)


class PredictionDrafter:
    """Proposes what comes next in the prediction of a request (`Guidance.prediction_token_ids`), if it has one."""

    def propose(self, request: "Request") -> list[int]:
        """Ids of the prediction; it is assumed to begin where the output begins."""
        if request.prediction is None:
            return []
        lookup = request.drafting.lookups.get(self)
        if lookup is None:
            lookup = request.drafting.lookups[self] = Lookup(request.prediction, request.num_prompt_tokens, 0)
        return lookup.propose(request.token_ids, MAX_NUM_DRAFTS)


class NgramDrafter:
    """Prompt lookup (`--speculative ngram`): proposes what followed the last ids where they occurred before."""

    def propose(self, request: "Request") -> list[int]:
        """Ids of the prompt or of the output so far."""
        lookup = request.drafting.lookups.get(self)
        if lookup is None:
            text = Text(request.token_ids)
            lookup = request.drafting.lookups[self] = Lookup(text, len(request.token_ids), None)
        return lookup.propose(request.token_ids, MAX_NUM_DRAFTS)
