"""Where one output stands in its grammar.

Owns the parser's state, which has consumed exactly the known output ids. Never raises for what a grammar or an output
does: `accept` says in words that an output cannot go on.
"""

import re
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from weft.engine.guidance.forcing import Bits, Forcing, allow_only
from weft.engine.step.step_result import NO_TOKEN_ID

if TYPE_CHECKING:
    from llguidance import LLMatcher

_SOURCE_LINE = re.compile(r"\s*(\d+ \||\^+\s*$|<)")
_MAX_FAULT_CHARS = 300

_NUM_RECENT = 16
"""Ids that are remembered for the tokenizer: more than the pieces have into which it cuts text before all else."""


class GrammarMatcher:
    """A grammar and the output so far. Used by one thread at a time."""

    def __init__(self, matcher: "LLMatcher", forcing: Forcing) -> None:
        """Take a grammar that was compiled without the library's own forcing."""
        self._matcher = matcher
        self._forcing = forcing
        self._recent: deque[int] = deque(maxlen=_NUM_RECENT)
        self._forced: deque[int] = deque()
        """Ids that have to follow, as far as they were looked for: a run of them is computed once, from its start."""
        self._mask: Bits | None = None
        """What may follow the known output; None where nobody asked yet."""

    def copy(self) -> "GrammarMatcher":
        """Return a matcher of its own in the same state."""
        other = GrammarMatcher(self._matcher.deep_copy(), self._forcing)
        other._recent, other._forced, other._mask = self._recent.copy(), self._forced.copy(), self._mask
        return other

    @property
    def is_stopped(self) -> bool:
        """Whether nothing but the end can follow."""
        return self._matcher.is_stopped()

    def accept(self, token_id: int) -> str | None:
        """Move on by one sampled id; return why that cannot be, or None."""
        if token_id == NO_TOKEN_ID:
            return "no token is left that both the grammar and the other parameters of the request allow"
        self._mask = None
        self._recent.append(token_id)
        if self._forced and self._forced.popleft() != token_id:
            self._forced.clear()
        if not self._matcher.is_error() and self._matcher.consume_token(token_id):
            return None
        return f"the grammar cannot be followed any further: {one_line(self._matcher.get_error())}"

    def forced_token_ids(self, most: int) -> list[int]:
        """Up to `most` ids that have to follow: a mask allows nothing else at their positions. Often none."""
        if not self._forced and self._mask is None and not self.is_stopped:
            self._look()
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
        forced = self.forced_token_ids(len(masks))
        for index, row in enumerate(masks):
            drafts = list(draft_token_ids[index : index + 1])
            if index == 0 and self._mask is not None:
                row[:] = self._mask
            elif forced:
                allow_only(forced[0], row)
            else:
                forced = self._forcing.fill(self._matcher, [*self._recent, *draft_token_ids[:index]], row)
            if not drafts or (forced and drafts != forced[:1]) or self._matcher.try_consume_tokens(drafts) == 0:
                break
            forced = forced[1:]
            num_consumed += 1
            if self.is_stopped:
                break
        if num_consumed:
            self._matcher.rollback(num_consumed)

    def _look(self) -> None:
        """Find what may follow, and what has to."""
        self._mask = np.full(self._forcing.num_words, -1, np.int32)
        self._forced.extend(self._forcing.fill(self._matcher, self._recent, self._mask))


def one_line(fault: str) -> str:
    """The library's words for a fault without the source that it quotes, which may be long."""
    lines = [line.strip() for line in fault.partition("<backtrace>")[0].splitlines() if not _SOURCE_LINE.match(line)]
    text = " ".join(filter(None, lines))
    return text if len(text) <= _MAX_FAULT_CHARS else f"{text[:_MAX_FAULT_CHARS]}..."
