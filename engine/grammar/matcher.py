"""Where one output stands in its grammar.

Owns the parser's state, which has consumed exactly the known output ids. Never raises for what a grammar or an output
does: `accept` says in words that an output cannot go on.
"""

import re
from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from engine.step_result import NO_TOKEN_ID

if TYPE_CHECKING:
    from llguidance import LLMatcher

Bits = npt.NDArray[np.int32]

_SOURCE_LINE = re.compile(r"\s*(\d+ \||\^+\s*$|<)")
_MAX_FAULT_CHARS = 300


class GrammarMatcher:
    """A grammar and the output so far. Used by one thread at a time."""

    def __init__(self, matcher: "LLMatcher", forced: Iterable[int] = ()) -> None:
        self._matcher = matcher
        self._forced = deque(forced)
        """Ids that have to follow, as far as they were looked for: a run of them is computed once, from its start."""

    def copy(self) -> "GrammarMatcher":
        """Return a matcher of its own in the same state."""
        return GrammarMatcher(self._matcher.deep_copy(), self._forced)

    @property
    def is_stopped(self) -> bool:
        """Whether nothing but the end can follow."""
        return self._matcher.is_stopped()

    def accept(self, token_id: int) -> str | None:
        """Move on by one sampled id; return why that cannot be, or None."""
        if token_id == NO_TOKEN_ID:
            return "no token is left that both the grammar and the other parameters of the request allow"
        if self._forced and self._forced.popleft() != token_id:
            self._forced.clear()
        if not self._matcher.is_error() and self._matcher.consume_token(token_id):
            return None
        return f"the grammar cannot be followed any further: {one_line(self._matcher.get_error())}"

    def forced_token_ids(self, most: int) -> list[int]:
        """Up to `most` ids that have to follow: a mask allows nothing else at their positions. Often none."""
        if not self._forced and not self.is_stopped:
            self._forced.extend(self._matcher.compute_ff_tokens())
        return list(islice(self._forced, most))

    def allows(self, draft_token_ids: tuple[int, ...], token_id: int) -> bool:
        """Whether an id may follow the output and these drafts."""
        num_consumed = self._matcher.try_consume_tokens(list(draft_token_ids))
        is_allowed = num_consumed == len(draft_token_ids) and self._matcher.validate_tokens([token_id]) == 1
        self._matcher.rollback(num_consumed)
        return is_allowed

    def fill_masks(self, draft_token_ids: tuple[int, ...], masks: Bits) -> None:
        """Write which ids may follow the output, and which may follow it behind each draft. Leaves the state alone.

        Args:
            draft_token_ids: Guesses for the next ids, in order.
            masks: (1 + num_drafts, vocab_size / 32) one bit per id; C-contiguous. The rows behind a draft that the
                grammar refuses, or with which it ends, stay as they are: nothing is sampled from them.
        """
        num_consumed = 0
        forced = list(islice(self._forced, len(masks)))
        for index, row in enumerate(masks):
            drafts = list(draft_token_ids[index : index + 1])
            if index < len(forced):  # to find that out again takes time that grows with the run
                _allow_only(forced[index], row)
                drafts = drafts if drafts == [forced[index]] else []
            else:
                self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            if not drafts or self._matcher.try_consume_tokens(drafts) == 0:
                break
            num_consumed += 1
            if self.is_stopped:
                break
        if num_consumed:
            self._matcher.rollback(num_consumed)


def _allow_only(token_id: int, mask: Bits) -> None:
    mask.fill(0)
    mask.view(np.uint32)[token_id // 32] = 1 << token_id % 32


def one_line(fault: str) -> str:
    """The library's words for a fault without the source that it quotes, which may be long."""
    lines = [line.strip() for line in fault.partition("<backtrace>")[0].splitlines() if not _SOURCE_LINE.match(line)]
    text = " ".join(filter(None, lines))
    return text if len(text) <= _MAX_FAULT_CHARS else f"{text[:_MAX_FAULT_CHARS]}..."
