"""Reads questions in the shapes of SGLang and of System One; in these, each has an id."""

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from weft.server.errors import InvalidRequestError, shown
from weft.server.formats.reasoning import Switch
from weft.server.request.decision_input import compact_json, not_blank
from weft.server.request.decision_questions import YES_AND_NO, Asked, choice_of, level_of, yes_or_no
from weft.server.request.template_options import checked_kwargs
from weft.server.request.validation import required
from weft.server.schemas.decision_shapes import JsonText, SglangBody, SglangQuestion, SystemOneBody, SystemOneQuestion

PROMPT_FORMAT_VERSION = 1
_LINES = ("Cc", "Zl", "Zp")


@dataclass(frozen=True, slots=True)
class Named:
    """One question: its id, its type on the wire, and the name and the description of each answer."""

    id: str
    type: str
    names: Sequence[str]
    details: Sequence[JsonText | None]
    asked: Asked


def read_sglang(body: SglangBody) -> list[Named]:
    """The questions in SGLang's shape.

    Raises:
        InvalidRequestError: An id occurs twice, a text is blank, a member is missing, or another wording is wanted.
    """
    version = body.prompt_format_version
    if version not in (None, PROMPT_FORMAT_VERSION):
        message = f"prompt_format_version must be {PROMPT_FORMAT_VERSION}, got {shown(version)}"
        raise InvalidRequestError(message, param="prompt_format_version")
    ids: set[str] = set()
    named = []
    for i, question in enumerate(body.questions):
        at = f"questions[{i}]"
        if not_blank(question.id, f"{at}.id") in ids:
            message = f"{at}.id must differ from those of other questions, got {shown(question.id)}"
            raise InvalidRequestError(message, param=f"{at}.id")
        ids.add(question.id)
        named.append(_sglang(question, at))
    return named


def read_systemone(body: SystemOneBody) -> list[Named]:
    """The questions in System One's shape. Raises as `read_sglang`."""
    return [_systemone(name, question, f"questions.{name}") for name, question in body.questions.items()]


def text_of(value: JsonText | None, at: str) -> str:
    """A text, or JSON as text; empty for None."""
    return "" if value is None else value if isinstance(value, str) else compact_json(value, at)


def thinking_off(switch: Switch | None, given: Mapping[str, object] | None) -> dict[str, object]:
    """The caller's template variables, and the one that switches thinking off.

    Raises:
        InvalidRequestError: The caller switches it on.
    """
    off = switch.off if switch else {}
    for name, value in off.items():
        if given and given.get(name, value) != value:
            param = f"chat_template_kwargs.{name}"
            raise InvalidRequestError(f"{param} must be {shown(value)}, got {shown(given[name])}", param=param)
    return {**checked_kwargs(given), **off}


def _sglang(question: SglangQuestion, at: str) -> Named:
    members = {"choice": ("options",), "score": ("levels",), "yes_no": ("yes", "no")}
    for kind, names in members.items():
        for name in names:
            if kind != question.type and getattr(question, name) is not None:
                message = f"{at}.{name} is only allowed for questions of type {kind}"
                raise InvalidRequestError(message, param=f"{at}.{name}")
    text = not_blank(text_of(question.question, f"{at}.question"), f"{at}.question")
    match question.type:
        case "choice":
            options = required(question.options, f"{at}.options")
            criteria = [(option.name, option.description) for option in options]
            return _choice(question.id, text, criteria, at, "options")
        case "score":
            return _score(question.id, text, required(question.levels, f"{at}.levels"), at, "levels")
        case _:
            return _yes_no(question.id, "yes_no", text, (question.yes, question.no), at)


def _systemone(name: str, question: SystemOneQuestion, at: str) -> Named:
    criteria = question.criteria
    text = text_of(question.instructions, f"{at}.instructions").strip()
    wanted = {"noul": dict | None, "choice": dict, "score": list}[question.type]
    is_known = isinstance(criteria, wanted) and (question.type != "noul" or {*(criteria or ())} <= {"true", "false"})
    if not is_known:
        what = "a list of levels" if question.type == "score" else "an object"
        what += " with `true` and `false`" if question.type == "noul" else ""
        raise InvalidRequestError(f"{at}.criteria must be {what}, got {shown(criteria)}", param=f"{at}.criteria")
    if isinstance(criteria, list):
        return _score(name, text, criteria, at, "criteria")
    if question.type == "choice":
        return _choice(name, text, (criteria or {}).items(), at, "criteria")
    details = tuple((criteria or {}).get(key) for key in ("true", "false"))
    not_blank(text + "".join(text_of(detail, at) for detail in details), f"{at}.instructions")
    return _yes_no(name, "noul", text, details, at)


def _choice(name: str, text: str, criteria: Iterable[tuple[str, JsonText | None]], at: str, member: str) -> Named:
    pairs, seen = list(criteria), set[str]()
    for option, _ in pairs:
        not_blank(option, f"{at}.{member}")
        if option.strip().casefold() in seen or any(unicodedata.category(char) in _LINES for char in option):
            message = f"{at}.{member} must have different names without control characters, got {shown(option)}"
            raise InvalidRequestError(message, param=f"{at}.{member}")
        seen.add(option.strip().casefold())
    names, details = [option for option, _ in pairs], [detail for _, detail in pairs]
    asked = choice_of(text, names, [text_of(detail, f"{at}.{member}") for detail in details], at)
    return Named(name, "choice", names, details, asked)


def _score(name: str, text: str, levels: Sequence[JsonText], at: str, member: str) -> Named:
    lines = [not_blank(text_of(level, f"{at}.{member}[{i}]"), f"{at}.{member}[{i}]") for i, level in enumerate(levels)]
    return Named(name, "score", [str(i) for i in range(len(levels))], levels, level_of(text, lines, at))


def _yes_no(name: str, kind: str, text: str, details: Sequence[JsonText | None], at: str) -> Named:
    return Named(name, kind, YES_AND_NO, details, yes_or_no(text, [text_of(detail, at) for detail in details], at))
