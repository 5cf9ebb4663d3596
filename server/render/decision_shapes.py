"""Writes decisions in the shapes of SGLang and of System One: one answer for each id."""

from collections.abc import Sequence
from typing import Any

import msgspec

from weft.server.generate.events import Counts
from weft.server.render.decisions import choice_confidence, expected_level, label_mass, score_confidence, softmax
from weft.server.request.decision_shapes import PROMPT_FORMAT_VERSION, Named


def render_sglang(
    named: Sequence[Named], scores: Sequence[Sequence[float]], counts: Counts, name: str, temperature: float
) -> bytes:
    """The whole answer in SGLang's shape. The temperature changes the probabilities and not the label mass."""
    answers: dict[str, dict[str, Any]] = {}
    for question, logs in zip(named, scores, strict=True):
        shares = softmax(logs, temperature)
        answers[question.id] = {
            "type": question.type,
            **({"choice": _best(question, shares)} if question.type == "choice" else {}),
            **({"score": expected_level(shares)} if question.type == "score" else {}),
            "probabilities": dict(zip(question.names, shares, strict=True)),
            "label_mass": label_mass(logs),
        }
    num_tokens = counts.prompt_tokens
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens, "completion_tokens": 0}
    version = PROMPT_FORMAT_VERSION
    return msgspec.json.encode({"model": name, "prompt_format_version": version, "answers": answers, "usage": usage})


def render_systemone(named: Sequence[Named], scores: Sequence[Sequence[float]], counts: Counts, name: str) -> bytes:
    """The whole answer in System One's shape."""
    answers = {question.id: _answer(question, logs) for question, logs in zip(named, scores, strict=True)}
    usage = {"input_tokens": counts.prompt_tokens, "output_tokens": 0}
    return msgspec.json.encode({"model": name, "answers": answers, "usage": usage})


def _answer(question: Named, logs: Sequence[float]) -> dict[str, Any]:
    shares = softmax(logs)
    answer: dict[str, Any] = {"type": question.type, "x_label_mass": label_mass(logs)}
    if question.type == "noul":
        return {**answer, "noul": shares[0]}
    answer["probabilities"] = dict(zip(question.names, shares, strict=True))
    if question.type == "choice":
        return {**answer, "choice": _best(question, shares), "confidence": choice_confidence(shares)}
    legend = dict(zip(question.names, question.details, strict=True))
    return {**answer, "score": expected_level(shares), "confidence": score_confidence(shares), "legend": legend}


def _best(question: Named, shares: Sequence[float]) -> str:
    return question.names[shares.index(max(shares))]
