"""Where a chunk of a prompt may end among the tokens of pictures that see each other (`PagedKV.num_mutual`).

Such tokens are computed in one step: what each leaves in the cache depends on all of them. So a chunk ends before them
or behind them. What the prefix cache has of them was computed with all of them in view, and the hash of each block that
they touch names the whole picture. So a cached prefix may end among them; then the others are computed in one step.
Between the tokens that features take the place of, a picture may have markers, where a chunk may end.
"""

from collections.abc import Sequence
from itertools import takewhile

from weft.engine.cache.specs import CacheSpec
from weft.engine.request import Request


class WholePictures:
    """The rule of one model.

    Attributes:
        longest: Most tokens of a picture that see each other; 0 where none do, and then any chunk is right.
    """

    def __init__(self, specs: Sequence[CacheSpec]) -> None:
        """Look at what each layer keeps."""
        self.longest = max((spec.num_mutual for spec in specs), default=0)

    def least(self, request: Request, start: int) -> int:
        """How many tokens from start on have to be computed in one step; 0 if any number is right."""
        for span, picture in zip(request.spans, request.pictures, strict=False):  # spans may stand for something else
            if self.longest and span.start <= start < span.start + span.num_tokens:
                ids, token_id = request.token_ids[start : span.start + span.num_tokens], picture.token_id
                return sum(1 for _ in takewhile(token_id.__eq__, ids))
        return 0

    def cut(self, request: Request, start: int, num_tokens: int) -> int:
        """How many of the num_tokens tokens from start on a step may compute; 0 if not even the picture there fits."""
        end, ids = start + num_tokens, request.token_ids
        for span, picture in zip(request.spans, request.pictures, strict=False):
            if self.longest and span.start < end < span.start + span.num_tokens:
                while end > max(start, span.start) and ids[end - 1] == ids[end] == picture.token_id:
                    end -= 1
        return end - start

    def first(self, prefills: Sequence[Request]) -> Request:
        """Which of the prefills, in their order, a step computes first, so that there is room for it.

        It is one that stands before such tokens, or it could wait for ever; else the one with the fewest tokens.
        """
        standing = (r for r in prefills if self.least(r, r.num_computed_tokens))
        return next(standing, None) or min(prefills, key=lambda r: r.num_new_tokens)
