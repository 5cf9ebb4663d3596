"""What the parameters of a request do to the logits of each of its rows, as arrays that are made once.

Such a list may name the whole vocabulary: a step copies arrays, and builds none from Python numbers.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from weft.engine.shared.sampling_params import SamplingParams
from weft.engine.step.batch import Floats, Ints


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """Shared by the choices of a request.

    Attributes:
        bias_ids, bias_values: (b,) added in every row; -inf bans, as it does the bad words of one id.
        stop_ids, stop_bans: (s,) added until there are min_tokens.
        allowed_ids: (a,) rising, each once; None allows all.
        words: Bad words of two ids and more.
        longest_word: Ids of the longest of them.
    """

    bias_ids: Ints
    bias_values: Floats
    stop_ids: Ints
    stop_bans: Floats
    allowed_ids: Ints | None
    words: tuple[tuple[int, ...], ...]
    longest_word: int

    def leave_nothing(self, num_output_tokens: int, min_tokens: int, context: Sequence[int] = ()) -> bool:
        """Whether nothing can be sampled behind the context; only where allowed ids are given this may be."""
        if self.allowed_ids is None:
            return False
        banned = {int(i) for i in self.bias_ids[np.isneginf(self.bias_values)]}
        banned.update(self.stop_ids.tolist() if num_output_tokens < min_tokens else ())
        tail = list(context[-self.longest_word :]) if self.words else []
        banned.update(word[-1] for word in self.words if tail[len(tail) - len(word) + 1 :] == list(word[:-1]))
        return len(self.allowed_ids) <= len(banned) and banned.issuperset(self.allowed_ids.tolist())


def make_edits(params: SamplingParams, stop_ids: Collection[int]) -> LogitEdits:
    """Make the arrays of a request; stop_ids are the caller's and the model's."""
    single = [word[0] for word in params.bad_words_token_ids if len(word) == 1]
    words = tuple(word for word in params.bad_words_token_ids if len(word) > 1)
    allowed = params.allowed_token_ids
    return LogitEdits(
        bias_ids=np.array([*params.logit_bias, *single], np.int64),
        bias_values=np.array([*params.logit_bias.values(), *[-np.inf] * len(single)], np.float32),
        stop_ids=np.array(sorted(stop_ids), np.int64),
        stop_bans=np.full(len(stop_ids), -np.inf, np.float32),
        allowed_ids=None if allowed is None else np.flatnonzero(np.bincount(np.array(allowed, np.int64))),
        words=words,
        longest_word=max(map(len, words), default=0),
    )
