"""Writes the questions of POST /v1/decisions as texts for the model, with the labels of their answers.

No label is the beginning of another one. So each label's probability is that of its own text.
"""

import string
from collections.abc import Sequence
from dataclasses import dataclass

from weft.server.errors import InvalidRequestError, shown
from weft.server.request.decision_input import instructions_of, not_blank
from weft.server.request.validation import required
from weft.server.schemas.decisions import DecisionQuestion

YES_AND_NO = ("yes", "no")
_MAX_DIGITS = 10
_LETTERS = string.ascii_uppercase


@dataclass(frozen=True, slots=True)
class Asked:
    """One question: its text, the label of each answer, and its path in the body."""

    text: str
    labels: Sequence[str]
    at: str


def read_questions(questions: Sequence[DecisionQuestion]) -> list[Asked]:
    """The questions in OpenAI's shape.

    Raises:
        InvalidRequestError: A question lacks a member or has one of another type, a text is blank, or a value or a name
            occurs twice.
        UnsupportedValueError: A question has an image.
    """
    names: set[str] = set()
    asked = []
    for i, question in enumerate(questions):
        at = f"questions[{i}]"
        if question.name is not None:
            if question.name in names:
                message = f"{at}.name must differ from those of other questions, got {shown(question.name)}"
                raise InvalidRequestError(message, param=f"{at}.name")
            names.add(question.name)
        asked.append(_read(question, at))
    return asked


def _read(question: DecisionQuestion, at: str) -> Asked:
    for member, kind in (("choices", "choice"), ("levels", "score")):
        if getattr(question, member) is not None and question.type != kind:
            message = f"{at}.{member} is only allowed for questions of type {kind}"
            raise InvalidRequestError(message, param=f"{at}.{member}")
    instructions = instructions_of(question.instructions, f"{at}.instructions")
    match question.type:
        case "predicate":
            return yes_or_no(instructions, (None, None), at)
        case "choice":
            choices = required(question.choices, f"{at}.choices")
            if len({(type(choice.value), choice.value) for choice in choices}) < len(choices):
                message = f"{at}.choices must have different values, got one of them twice"
                raise InvalidRequestError(message, param=f"{at}.choices")
            for j, choice in enumerate(choices):
                not_blank(str(choice.value), f"{at}.choices[{j}].value")
            shown_values = [str(c.value).lower() if isinstance(c.value, bool) else c.value for c in choices]
            return choice_of(instructions, shown_values, [choice.description for choice in choices], at)
        case _:
            levels = required(question.levels, f"{at}.levels")
            for j, level in enumerate(levels):
                not_blank(level.label, f"{at}.levels[{j}].label")
            return level_of(instructions, [_described(level.label, level.description) for level in levels], at)


def yes_or_no(question: str, details: Sequence[str | None], at: str) -> Asked:
    """Ask whether a statement is true. `details` tell what yes and no mean."""
    lines = [f"{label}: {detail}" for label, detail in zip(YES_AND_NO, details, strict=True) if detail]
    text = [f"Is the following true? {question}".rstrip(), *lines, "Answer with yes or no only."]
    return Asked("\n".join(text), YES_AND_NO, at)


def choice_of(question: str, names: Sequence[str], details: Sequence[str | None], at: str) -> Asked:
    """Ask for one of several options."""
    labels = _labels(len(names))
    lines = [f"{label}: {_described(name, detail)}" for label, name, detail in zip(labels, names, details, strict=True)]
    what = "letter" if len(labels[0]) == 1 else "letters"
    text = [*_heading(question), *lines, f"Answer with the {what} of one option only."]
    return Asked("\n".join(text), labels, at)


def level_of(question: str, levels: Sequence[str], at: str) -> Asked:
    """Ask for one of several ordered levels."""
    labels = string.digits[: len(levels)] if len(levels) <= _MAX_DIGITS else _labels(len(levels))
    what = "number" if len(levels) <= _MAX_DIGITS else "letters" if len(labels[0]) > 1 else "letter"
    lines = [f"{label}: {level}" for label, level in zip(labels, levels, strict=True)]
    text = [*_heading(question), *lines, f"Answer with the {what} of one level only."]
    return Asked("\n".join(text), labels, at)


def _labels(count: int) -> Sequence[str]:
    """One letter each, or two if there are more than 26."""
    return _LETTERS[:count] if count <= len(_LETTERS) else [a + b for a in _LETTERS for b in _LETTERS][:count]


def _heading(question: str) -> list[str]:
    return [f"Question: {question}"] if question else []


def _described(name: str, detail: str | None) -> str:
    return f"{name} - {detail}" if detail else name
