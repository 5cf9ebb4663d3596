"""The pure search against an exhaustive one, and its ends."""

import itertools
import math
import random
from typing import Any

import pytest

from weft.engine.loop.beams import Beam, Beams
from weft.engine.wire.messages import BeamOptions, TokenLogprobs

EOS = 0


def table(seed: int, vocab_size: int, depth: int) -> dict[tuple[int, ...], list[float]]:
    """Log-probabilities of the next id after every context."""
    generator = random.Random(seed)
    rows = {}
    for length in range(depth):
        for context in itertools.product(range(vocab_size), repeat=length):
            weights = [generator.random() ** 3 + 1e-3 for _ in range(vocab_size)]
            rows[context] = [math.log(weight / sum(weights)) for weight in weights]
    return rows


def row(logprobs: list[float], count: int) -> TokenLogprobs:
    best = sorted(range(len(logprobs)), key=lambda i: -logprobs[i])[:count]
    return TokenLogprobs(0.0, best, [logprobs[i] for i in best])


def search(
    rows: dict[tuple[int, ...], list[float]], width: int, max_tokens: int, **options: Any
) -> tuple[list[Beam], int]:
    beams = Beams(width, max_tokens, frozenset({EOS}), BeamOptions(**options))
    num_steps = 0
    while not beams.is_done:
        beams.advance([row(rows[tuple(beam.token_ids)], 2 * width) for beam in beams.live])
        num_steps += 1
    return beams.best, num_steps


def test_a_search_as_wide_as_everything_finds_the_best_outputs() -> None:
    rows, max_tokens, penalty = table(1, 3, 4), 4, 0.7

    def outputs(context: tuple[int, ...], logprob: float) -> list[tuple[float, tuple[int, ...]]]:
        if context and (context[-1] == EOS or len(context) == max_tokens):
            return [(logprob / len(context) ** penalty, context)]
        return [found for i, value in enumerate(rows[context]) for found in outputs((*context, i), logprob + value)]

    expected = [ids for _, ids in sorted(outputs((), 0.0), reverse=True)]
    best, _ = search(rows, 40, max_tokens, length_penalty=penalty, early_stopping="never")
    assert [tuple(beam.token_ids) for beam in best] == expected[:40]


def test_the_sum_and_the_entries_are_those_of_the_path() -> None:
    rows = table(2, 4, 5)
    for beam in search(rows, 3, 5)[0]:
        steps = [rows[tuple(beam.token_ids[:i])][token_id] for i, token_id in enumerate(beam.token_ids)]
        assert [entry.logprob for entry in beam.entries] == steps
        assert beam.logprob == pytest.approx(sum(steps))


def test_early_stopping_ends_sooner_and_never_ends_last() -> None:
    rows = table(6, 3, 7)
    assert [search(rows, 2, 7, early_stopping=early)[1] for early in (True, False, "never")] == [2, 4, 7]


def test_the_length_penalty_prefers_long_or_short_outputs() -> None:
    rows = table(4, 5, 7)
    long, short = (search(rows, 3, 7, length_penalty=penalty, early_stopping="never")[0] for penalty in (8.0, -8.0))
    assert len(long[0].token_ids) > len(short[0].token_ids) == 1
