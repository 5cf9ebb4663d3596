"""Ids of an output that are known without being sampled, because its grammar leaves no choice.

They join the output at once, and are computed like a part of the prompt: in chunks, under the budget of the steps, with
no row of logits until the last. Where a parameter may forbid such an id, or wants to know how probable it was, every id
needs a row; then forced ids are drafts (`weft.engine.speculation.drafters.ForcedTokens`), a few at a time.
"""

from itertools import takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.engine.core.request import Request


def needs_rows(request: "Request") -> bool:
    """Whether what a grammar forces has to be sampled nevertheless."""
    params, reasoning = request.params, request.reasoning
    is_restricted = params.allowed_token_ids is not None or bool(params.bad_words_token_ids)
    may_have_to_end = reasoning is not None and not reasoning.has_ended
    return is_restricted or may_have_to_end or params.logprobs is not None


def certain_token_ids(request: "Request") -> list[int]:
    """Ids that go behind the known output, whatever the model says; none from the first on that may end it."""
    if request.grammar is None or needs_rows(request):
        return []
    forced = request.grammar.forced_token_ids(request.num_remaining_tokens)
    return list(takewhile(lambda token_id: token_id not in request.stop_ids, forced))
