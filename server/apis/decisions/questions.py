"""Reads the bodies of decisions: the input becomes messages, and each question a text with labels for its answers.

Messages stay messages, and calls become those of the assistant. JSON is shown as compact text. Questions come in the
shapes of OpenAI, SGLang and System One; in the latter two, each has an id. No label is the beginning of another one, so
each label's probability is that of its own text.
"""

import json
import string
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.server.apis.decisions import schema as wire
from weft.server.errors import InvalidRequestError, UnsupportedValueError, shown
from weft.server.formats.reasoning import Switch
from weft.server.task.bodies import ContentPart, CustomCall, FunctionCall, Message, ToolCall
from weft.server.task.template_options import checked_kwargs
from weft.server.task.validation import NOTHING, OFF, Refused, check_range, required

REFUSED_IN_SGLANG_DECISIONS: Refused = {"images": (None, []), "return_prompt_token_ids": OFF}
REFUSED_IN_SYSTEMONE: Refused = {
    **REFUSED_IN_SGLANG_DECISIONS,
    "temperature": NOTHING,
    "prompt_format_version": NOTHING,
}

MAX_JSON_LEVELS = 32
MAX_JSON_VALUES = 10_000
MAX_JSON_BYTES = 256 << 10
MAX_NAMED = 8
"""Most repeated answers that an error names."""
_USER_PARTS = frozenset({"input_text", "input_json"})
_PARTS = {"user": _USER_PARTS, "assistant": frozenset({"output_text", "refusal"})}


def chat_of(given: str | Sequence[wire.DecisionItem], param: str = "input") -> list[Message]:
    """The input as messages; `param` is its field.

    Raises:
        InvalidRequestError: An item lacks a member, is blank, or names a call that is not there.
        UnsupportedValueError: A part is an image.
    """
    if isinstance(given, str):
        return [Message(role="user", content=not_blank(given, param))]
    messages: list[Message] = []
    calls: set[tuple[str, str]] = set()
    for i, item in enumerate(given):
        at = f"input[{i}]"
        if item.type == "message":
            messages.append(_message(item, at))
            continue
        call_id = required(item.call_id, f"{at}.call_id")
        kind = item.type.removesuffix("_output")
        if item.type == kind:
            calls.add((kind, call_id))
            call = _call(item, call_id, at)
            if messages and messages[-1].role == "assistant":  # calls belong to the turn that they end
                calls_so_far = messages[-1].tool_calls or []
                messages[-1] = messages[-1].model_copy(update={"tool_calls": [*calls_so_far, call]})
            else:
                messages.append(Message(role="assistant", tool_calls=[call]))
        elif (kind, call_id) in calls:
            if item.output is None:
                raise InvalidRequestError(f"{at}.output is required", param=f"{at}.output")
            output = _content(item.output, f"{at}.output")
            messages.append(Message(role="tool", tool_call_id=call_id, content=output))
        else:
            message = f"{at}.call_id must be that of an earlier {kind}, got {shown(call_id)}"
            raise InvalidRequestError(message, param=f"{at}.call_id")
    return messages


def instructions_of(content: wire.DecisionContent, at: str) -> str:
    """The text of a question; `at` is its path in the body. Raises as `chat_of`."""
    read = _content(content, at, _USER_PARTS)
    text = read if isinstance(read, str) else "\n".join(part.text or "" for part in read)
    return not_blank(text, at)


def not_blank(text: str, at: str) -> str:
    """Return the text.

    Raises:
        InvalidRequestError: It holds white space only.
    """
    if not text.strip():
        raise InvalidRequestError(f"{at} must not be blank", param=at)
    return text


def check_different(values: Sequence[tuple[type, object]], what: str, at: str) -> None:
    """Check that no answer is there twice: which of the two is probable would mean nothing.

    Args:
        values: The answers with their types: "true" and true are different.

    Raises:
        InvalidRequestError: The error names each value that is repeated.
    """
    repeated = [value for (_, value), count in Counter(values).items() if count > 1]
    if repeated:
        named = ", ".join(map(shown, repeated[:MAX_NAMED])) + (", ..." if len(repeated) > MAX_NAMED else "")
        raise InvalidRequestError(f"{at} must have different {what}, got {named} twice", param=at)


def _folded(text: str) -> str:
    return text.strip().casefold()


def compact_json(data: object, at: str) -> str:
    """JSON data as its text.

    Raises:
        InvalidRequestError: It is too deep, too much or too long.
    """
    num_values = num_levels = 0
    for level in _levels(data):
        num_values += len(level)
        num_levels += any(map(_is_container, level))
        check_range(f"the container levels of {at}", num_levels, 0, MAX_JSON_LEVELS, param=at)
        check_range(f"the number of values in {at}", num_values, 0, MAX_JSON_VALUES, param=at)
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    check_range(f"the bytes of {at} as compact JSON", len(text.encode()), 0, MAX_JSON_BYTES, param=at)
    return text


def _levels(data: object) -> Iterator[list[Any]]:
    """The values of JSON data by their depth."""
    level: list[Any] = [data]
    while level:
        yield level
        lists = [value.values() if isinstance(value, dict) else value for value in level if _is_container(value)]
        level = [item for items in lists for item in items]


def _is_container(value: object) -> bool:
    return isinstance(value, list | dict)


def _message(item: wire.DecisionItem, at: str) -> Message:
    if item.role is None or item.content is None:
        param = f"{at}.role" if item.role is None else f"{at}.content"
        raise InvalidRequestError(f"{param} is required", param=param)
    return Message(role=item.role, content=_content(item.content, f"{at}.content", _PARTS.get(item.role)))


def _call(item: wire.DecisionItem, call_id: str, at: str) -> ToolCall:
    name = required(item.name, f"{at}.name")
    if item.type == "function_call":
        call = FunctionCall(name=name, arguments=required(item.arguments, f"{at}.arguments"))
        return ToolCall(id=call_id, function=call)
    return ToolCall(id=call_id, type="custom", custom=CustomCall(name=name, input=required(item.input, f"{at}.input")))


def _content(content: wire.DecisionContent, at: str, types: frozenset[str] | None = None) -> str | list[ContentPart]:
    """A content for a chat. `types` are the parts that it may have; None: texts alone."""
    if isinstance(content, str):
        return content
    parts = []
    for i, part in enumerate(content):
        path, kinds = f"{at}[{i}]", types or frozenset({"input_text"})
        if part.type == "input_image":
            raise UnsupportedValueError(f"{path}: this API does not take parts of type 'input_image'", param=path)
        if part.type not in kinds:
            wanted = ", ".join(sorted(kinds))
            message = f"{path}.type must be one of {wanted}, got {shown(part.type)}"
            raise InvalidRequestError(message, param=f"{path}.type")
        if part.type == "input_json":
            text = _json_text(part.data, f"{path}.data")
        else:
            name = "refusal" if part.type == "refusal" else "text"
            text = required(getattr(part, name), f"{path}.{name}")
        parts.append(ContentPart(type="text", text=text, prompt_cache_breakpoint=part.prompt_cache_breakpoint))
    return parts


def _json_text(data: object, at: str) -> str:
    items = data if isinstance(data, list) else [data]
    if not all(isinstance(item, dict) for item in items):
        raise InvalidRequestError(f"{at} must be an object or a list of objects, got {shown(data)}", param=at)
    return compact_json(data, at)


YES_AND_NO = ("yes", "no")
_MAX_DIGITS = 10
_LETTERS = string.ascii_uppercase


@dataclass(frozen=True, slots=True)
class Asked:
    """One question: its text, the label of each answer, and its path in the body."""

    text: str
    labels: Sequence[str]
    at: str


def read_questions(questions: Sequence[wire.DecisionQuestion]) -> list[Asked]:
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


def _read(question: wire.DecisionQuestion, at: str) -> Asked:
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
            check_different([(type(choice.value), choice.value) for choice in choices], "values", f"{at}.choices")
            for j, choice in enumerate(choices):
                not_blank(str(choice.value), f"{at}.choices[{j}].value")
            shown_values = [str(c.value).lower() if isinstance(c.value, bool) else c.value for c in choices]
            return choice_of(instructions, shown_values, [choice.description for choice in choices], at)
        case _:
            levels = required(question.levels, f"{at}.levels")
            for j, level in enumerate(levels):
                not_blank(level.label, f"{at}.levels[{j}].label")
            check_different([(str, _folded(level.label)) for level in levels], "labels", f"{at}.levels")
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


PROMPT_FORMAT_VERSION = 1
_LINES = ("Cc", "Zl", "Zp")
"""Unicode categories of control characters and of separators of lines."""


@dataclass(frozen=True, slots=True)
class Named:
    """One question: its id, its type on the wire, and the name and the description of each answer."""

    id: str
    type: str
    names: Sequence[str]
    details: Sequence[wire.JsonText | None]
    asked: Asked


def read_sglang(body: wire.SglangBody) -> list[Named]:
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


def _sglang(question: wire.SglangQuestion, at: str) -> Named:
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


def read_systemone(body: wire.SystemOneBody) -> list[Named]:
    """The questions in System One's shape. Raises as `read_sglang`."""
    return [_systemone(name, question, f"questions.{name}") for name, question in body.questions.items()]


def _systemone(name: str, question: wire.SystemOneQuestion, at: str) -> Named:
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


def _choice(name: str, text: str, criteria: Iterable[tuple[str, wire.JsonText | None]], at: str, member: str) -> Named:
    pairs, seen = list(criteria), set[str]()
    for option, _ in pairs:
        not_blank(option, f"{at}.{member}")
        if _folded(option) in seen or any(unicodedata.category(char) in _LINES for char in option):
            message = f"{at}.{member} must have different names without control characters, got {shown(option)}"
            raise InvalidRequestError(message, param=f"{at}.{member}")
        seen.add(_folded(option))
    names, details = [option for option, _ in pairs], [detail for _, detail in pairs]
    asked = choice_of(text, names, [text_of(detail, f"{at}.{member}") for detail in details], at)
    return Named(name, "choice", names, details, asked)


def _score(name: str, text: str, levels: Sequence[wire.JsonText], at: str, member: str) -> Named:
    lines = [not_blank(text_of(level, f"{at}.{member}[{i}]"), f"{at}.{member}[{i}]") for i, level in enumerate(levels)]
    check_different([(str, _folded(line)) for line in lines], "levels", f"{at}.{member}")
    return Named(name, "score", [str(i) for i in range(len(levels))], levels, level_of(text, lines, at))


def _yes_no(name: str, kind: str, text: str, details: Sequence[wire.JsonText | None], at: str) -> Named:
    return Named(name, kind, YES_AND_NO, details, yes_or_no(text, [text_of(detail, at) for detail in details], at))


def text_of(value: wire.JsonText | None, at: str) -> str:
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
