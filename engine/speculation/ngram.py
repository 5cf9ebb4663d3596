"""Prompt lookup (`--speculative ngram`): an output often repeats what its prompt or the output so far has said."""

from typing import TYPE_CHECKING

from engine.speculation.lookup import Lookup, Text
from engine.speculation.pace import MAX_NUM_DRAFTS

if TYPE_CHECKING:
    from engine.request import Request


class NgramDrafter:
    """Proposes what followed the last ids of a request where they occurred before."""

    def propose(self, request: "Request") -> list[int]:
        """Ids of the prompt or of the output so far."""
        lookup = request.drafting.lookups.get(self)
        if lookup is None:
            text = Text(request.token_ids)
            lookup = request.drafting.lookups[self] = Lookup(text, len(request.token_ids), None)
        return lookup.propose(request.token_ids, MAX_NUM_DRAFTS)
