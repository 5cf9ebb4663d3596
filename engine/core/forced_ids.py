"""Finds output ids that a grammar forces: appended unsampled, or drafted where each must be sampled.

Where possible, forced ids join the output at once (`certain_token_ids`). They are then computed like a part of the
prompt: in chunks, under the budget of the steps, without rows of logits. Some parameters may forbid a forced id or ask
for its log-probability. Such requests need a row for every id, so their forced ids are drafts (`ForcedTokens`).
"""

from itertools import takewhile

from weft.engine.request import Request
from weft.engine.speculation.pace import MAX_NUM_DRAFTS


def certain_token_ids(request: Request) -> list[int]:
    """Ids that must follow the known output, up to the first one that may end the output, exclusive."""
    if request.grammar is None or _needs_rows(request):
        return []
    forced = request.grammar.forced_token_ids(request.num_remaining_tokens)
    return list(takewhile(lambda token_id: token_id not in request.stop_ids, forced))


class ForcedTokens:
    """Drafts forced ids for requests that need a row for each id."""

    def propose(self, request: Request) -> list[int]:
        """Return forced ids behind the known output."""
        if request.grammar is None or not _needs_rows(request):
            return []
        return request.grammar.forced_token_ids(MAX_NUM_DRAFTS)


def _needs_rows(request: Request) -> bool:
    """Whether even forced ids must be sampled."""
    params, reasoning = request.params, request.reasoning
    is_restricted = params.allowed_token_ids is not None or bool(params.bad_words_token_ids)
    may_have_to_end = reasoning is not None and not reasoning.has_ended
    return is_restricted or may_have_to_end or params.logprobs is not None
