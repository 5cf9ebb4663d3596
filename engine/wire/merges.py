"""Finds the merges of a BPE vocabulary that is kept without them: as scores (SentencePiece) or ranks (tiktoken).

Such an encoder joins the two neighbours that make the best token, whichever they are, so every way to make a token of
two others is a merge. Long tokens stay unmade, and the number of characters to cut is bounded.
"""

from collections.abc import Mapping

MAX_TOKEN = 512
"""Characters of the longest token that SentencePiece's trainer makes."""
MAX_CHARACTERS = 1 << 23


class TooManyTokensError(ValueError):
    """The tokens have more than `MAX_CHARACTERS`; one line."""


def find_merges(order: Mapping[str, float]) -> list[tuple[str, str]]:
    """All merges, the first one to be applied first.

    Args:
        order: Every token that merges make or take, with its place: those with the least number are made first.

    Raises:
        TooManyTokensError: They are not cut up.
    """
    tokens = {token: place for token, place in order.items() if len(token) <= MAX_TOKEN}
    if (size := sum(map(len, tokens))) > MAX_CHARACTERS:
        raise TooManyTokensError(f"tokens of {size:,} characters, at most {MAX_CHARACTERS:,} are supported")
    ranked = [
        (place, index, token[:cut], token[cut:])
        for index, (token, place) in enumerate(tokens.items())
        for cut in range(1, len(token))
        if token[:cut] in tokens and token[cut:] in tokens
    ]
    return [(first, second) for _, _, first, second in sorted(ranked, key=lambda merge: merge[:2])]
