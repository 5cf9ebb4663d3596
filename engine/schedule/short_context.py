"""Models with LongRoPE: a request that outgrows the short context is computed anew, with other frequencies."""

from collections.abc import Iterable

from weft.engine.request import Request

_LONG = b"long"
"""What the seed of a request ends with if it is long."""


class ShortContext:
    """Decides which frequencies requests have, and changes that of those of which nothing is computed.

    All tokens of a request that outgrew the short context have the frequencies of long contexts, as transformers has
    it. A request that stays short never has them, whatever the longest context is. Where the model looks positions up
    says which a request has, see `RotaryTable`. Blocks of the two kinds have different seeds, so that they are never
    shared.
    """

    def __init__(self, num_tokens: int) -> None:
        """Take the short context's tokens, see `ModelFacts`; 0 means that all lengths are alike."""
        self._num_tokens = num_tokens

    def fits(self, request: Request) -> bool:
        """Whether a request has the frequencies of its length."""
        return not self._num_tokens or request.table_offset == self._offset(request)

    def settle(self, request: Request) -> None:
        """Give a request that waits the frequencies of its length."""
        if not self.fits(request):
            request.table_offset = self._offset(request)
            seed = request.cache_seed
            request.cache_seed = seed + _LONG if request.table_offset else seed.removesuffix(_LONG)
            request.block_hashes = []

    def outgrown(self, running: Iterable[Request]) -> list[Request]:
        """The running requests that must be computed anew before they go on; drafts of others end at the border."""
        short = [r for r in running if self._num_tokens and not r.table_offset]
        for request in short:
            del request.draft_token_ids[max(self._num_tokens - request.num_tokens, 0) :]
        return [r for r in short if r.num_new_tokens > 0 and r.num_remaining_tokens > 0 and not self.fits(r)]

    def _offset(self, request: Request) -> int:
        return self._num_tokens if request.num_tokens > self._num_tokens else 0
