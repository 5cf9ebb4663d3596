"""Predicted outputs: the caller says what the output will probably hold (`Guidance.prediction_token_ids`)."""

from typing import TYPE_CHECKING

from engine.speculation.lookup import Lookup
from engine.speculation.pace import MAX_NUM_DRAFTS

if TYPE_CHECKING:
    from engine.request import Request


class PredictionDrafter:
    """Proposes what comes next in the prediction of a request, if it has one."""

    def propose(self, request: "Request") -> list[int]:
        """Ids of the prediction; it is assumed to begin where the output begins."""
        if request.prediction is None:
            return []
        lookup = request.drafting.lookups.get(self)
        if lookup is None:
            lookup = request.drafting.lookups[self] = Lookup(request.prediction, request.num_prompt_tokens, 0)
        return lookup.propose(request.token_ids, MAX_NUM_DRAFTS)
