"""Ids that a grammar forces, proposed as drafts: the step that verifies them computes several tokens for one."""

from engine.request import Request


class ForcedTokens:
    """Proposes nothing where the grammar leaves a choice."""

    def propose(self, request: Request) -> list[int]:
        """Return the forced ids behind the known output."""
        return [] if request.grammar is None else request.grammar.forced_token_ids()
