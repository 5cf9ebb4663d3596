"""Writes the answers of POST /v1/decisions from the probabilities of their labels."""

import math
from collections.abc import Sequence

import msgspec

from weft.server.generate.events import Counts
from weft.server.schemas import decisions as wire
from weft.server.schemas.common import CachedTokens


def render_decision(
    questions: Sequence[wire.DecisionQuestion],
    scores: Sequence[Sequence[float]],
    counts: Counts,
    name: str,
    least: float,
) -> bytes:
    """The whole answer in OpenAI's shape.

    Args:
        scores: Logarithms of the labels' probabilities, by question.
        name: The model's name.
        least: If the labels of a question have less probability together, it is refused.
    """
    answers = [_answer(question, logs, least) for question, logs in zip(questions, scores, strict=True)]
    cached = CachedTokens(counts.cached_tokens, counts.cache_write_tokens)
    usage = wire.DecisionUsage(counts.prompt_tokens, cached, counts.prompt_tokens)
    return msgspec.json.encode(wire.Decision(answers, name, usage))


def _answer(question: wire.DecisionQuestion, logs: Sequence[float], least: float) -> wire.DecisionAnswer:
    mass, shares = label_mass(logs), softmax(logs)
    answer = wire.DecisionAnswer(type=question.type, name=question.name, x_label_mass=mass)
    if mass < least:
        answer.type = "refusal"
    elif question.type == "predicate":
        answer.probability = shares[0]
    elif question.type == "choice":
        values = [choice.value for choice in question.choices or ()]
        answer.choice = values[shares.index(max(shares))]
        answer.confidence = choice_confidence(shares)
        answer.probabilities = [wire.ValueProbability(*pair) for pair in zip(values, shares, strict=True)]
    else:
        answer.score = expected_level(shares)
        answer.confidence = score_confidence(shares)
        labels = [level.label for level in question.levels or ()]
        answer.probabilities = [
            wire.ValueProbability(i, share, label) for i, (share, label) in enumerate(zip(shares, labels, strict=True))
        ]
    return answer


def softmax(logs: Sequence[float], temperature: float = 1.0) -> list[float]:
    """Probabilities that are proportional to those whose logarithms are given, at this temperature."""
    top = max(logs)
    weights = [math.exp((log - top) / temperature) for log in logs]
    return [weight / sum(weights) for weight in weights]


def label_mass(logs: Sequence[float]) -> float:
    """How probable it is that the model writes one of the labels."""
    return min(1.0, sum(map(math.exp, logs)))


def expected_level(shares: Sequence[float]) -> float:
    """The mean of the levels' indices."""
    return sum(i * share for i, share in enumerate(shares))


def choice_confidence(shares: Sequence[float]) -> float:
    """0 if all are equally probable, 1 if one is certain."""
    n = len(shares)
    return 1.0 if n == 1 else min(1.0, max(0.0, (n * max(shares) - 1) / (n - 1)))


def score_confidence(shares: Sequence[float]) -> float:
    """1 less the mean distance from the most probable level, relative to the mean distance from the middle."""
    n, top = len(shares), shares.index(max(shares))
    spread = sum(abs(i - (n - 1) / 2) for i in range(n)) / n
    distance = sum(share * abs(i - top) for i, share in enumerate(shares))
    return 1.0 if n == 1 else max(0.0, 1 - distance / spread)
