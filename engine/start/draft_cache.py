"""Which slots of a draft model's cache hold what a request needs.

The cache has the block ids of the served model's. A block gets new content when the served model writes its first slot
or copies another block there. What the draft model then computes is noted slot by slot, as the id of the token. Drafts
are among it, so a slot is right if its id is the request's, and so are all before it.
"""

from collections.abc import Sequence

import numpy as np

from weft.engine.batch import GroupBatch, Ints
from weft.engine.request import Request

_NOTHING = -1


class DraftCache:
    """The notes of one cache."""

    def __init__(self, num_blocks: int, block_size: int, group: int) -> None:
        """Note nothing yet; group is that of the served model whose block tables count."""
        self._ids = np.full((num_blocks, block_size), _NOTHING, np.int32)
        self._block_size, self._group = block_size, group

    def forget(self, written: GroupBatch) -> None:
        """Note that a step of the served model gave blocks new content."""
        blocks, offsets = np.divmod(written.slot_mapping, self._block_size)
        self._ids[blocks[offsets == 0]] = _NOTHING
        self._ids[written.block_copies[:, 1]] = _NOTHING

    def num_right(self, request: Request) -> int:
        """Leading tokens of a request, without the last one, that need not be computed, or cannot be any more."""
        num_preemptions, first = request.drafting.num_right
        first, last = first * (num_preemptions == request.num_preemptions), request.num_tokens - 1
        blocks, offsets = self._slots(request, first, last)
        # Blocks that left a sliding window are 0. What the window of the next tokens misses of them makes drafts worse.
        wrong = np.flatnonzero((self._ids[blocks, offsets] != request.token_ids[first:last]) & (blocks != 0))
        found = first + int(wrong[0]) if len(wrong) else last
        request.drafting.num_right = request.num_preemptions, found
        return found

    def note(self, request: Request, start: int, token_ids: Sequence[int], num_known: int) -> None:
        """Note what was computed from a position on, of which num_known tokens are the request's and others drafts."""
        end = start + len(token_ids)
        self._ids[self._slots(request, start, end)] = token_ids
        room = len(request.block_tables[self._group]) * self._block_size
        # What follows was drafted behind other tokens; nothing behind a slot that is not right counts.
        self._ids[self._slots(request, end, min(end + 1, room))] = _NOTHING
        request.drafting.num_right = request.num_preemptions, start + num_known

    def _slots(self, request: Request, first: int, end: int) -> tuple[Ints, Ints]:
        """Block and offset of each position in a range."""
        table = np.array(request.block_tables[self._group][first // self._block_size :], np.int64)
        places, offsets = np.divmod(np.arange(first, end), self._block_size)
        return table[places - first // self._block_size], offsets
