"""Reads what a body asks of the chat template: how much the model may reason, how the prompt ends, and variables.

All fields that control reasoning meet in one `Thinking`. A model whose template cannot be told an effort gets a budget
of tokens instead; fields without effect on the model are reported.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from weft.server.errors import InvalidRequestError, UnsupportedParameterError
from weft.server.formats.detection import OutputFormats
from weft.server.formats.reasoning import reasoning_switch
from weft.server.task.bodies import ChatCompletionBody, ReasoningOptions
from weft.server.task.validation import check_range
from weft.server.text.chat_template import TemplateOptions
from weft.server.text.text_tokenizer import TextTokenizer

_BUDGETS: Final[Mapping[str, int | None]] = {
    "none": 0,
    "minimal": 256,
    "low": 1024,
    "medium": 8192,
    "high": None,
    "xhigh": None,
    "max": None,
}
"""Reasoning tokens by effort, for models whose template has no variable for the effort."""
_BUDGET_FIELDS = ("thinking_token_budget", "reasoning_budget_tokens")


@dataclass(frozen=True, slots=True)
class Thinking:
    """The reasoning options that a body asks for.

    Attributes:
        template_kwargs: Variables that switch reasoning in the template.
        max_tokens: Most tokens of reasoning; None: the model decides when to end it.
        ignored: Fields without effect on this model.
    """

    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    is_shown: bool = True
    ignored: Sequence[str] = ()


def read_thinking(body: ChatCompletionBody, formats: OutputFormats) -> Thinking:
    """Read the fields about reasoning.

    Raises:
        InvalidRequestError: A budget is negative, or two budgets differ.
    """
    max_tokens = _budget(body)
    has_effect = formats.reasoning_ids is not None or _tells_budget(formats)
    ignored = [name for name in _BUDGET_FIELDS if getattr(body, name) is not None and not has_effect]
    effort, name = _effort(body)
    thinking = thinking_of(effort, max_tokens, formats, name)
    is_shown, ignored = body.include_reasoning is not False, [*ignored, *thinking.ignored]
    return replace(thinking, is_shown=is_shown, ignored=ignored)


def _effort(body: ChatCompletionBody) -> tuple[str | None, str]:
    """The effort, and the field that holds it."""
    options = body.reasoning
    if options is None or options == ReasoningOptions():
        return body.reasoning_effort, "reasoning_effort"
    effort = "none" if options.enabled is False else options.effort
    if effort is not None and body.reasoning_effort not in (None, effort):
        message = f"reasoning_effort and reasoning mean the same, got {body.reasoning_effort} and {effort}"
        raise InvalidRequestError(message, param="reasoning")
    if options.enabled and effort is None and body.reasoning_effort is None:
        return "medium", "reasoning.enabled"
    return (effort, "reasoning.effort") if effort is not None else (body.reasoning_effort, "reasoning_effort")


def thinking_of(
    effort: str | None, max_tokens: int | None, formats: OutputFormats, field: str = "reasoning_effort"
) -> Thinking:
    """How a model may reason with this effort and this budget; None: not given. `field` holds the effort."""
    ignored: list[str] = []
    kwargs: Mapping[str, Any] = {}
    if effort is not None:
        switch = reasoning_switch(formats.template)
        if switch is not None:
            kwargs = switch.off if effort == "none" else switch.on
        if re.search(r"\breasoning_effort\b", formats.template):
            kwargs = {**kwargs, "reasoning_effort": effort}
        elif switch is None and formats.reasoning_ids is None:
            ignored.append(field)
        elif max_tokens is None and not (effort == "none" and switch):
            max_tokens = _BUDGETS[effort]
    if max_tokens is not None and _tells_budget(formats):
        kwargs = {**kwargs, "thinking_budget": max_tokens}
    return Thinking(kwargs, max_tokens, ignored=ignored)


def _tells_budget(formats: OutputFormats) -> bool:
    """Whether the template has a variable for the budget."""
    return re.search(r"\bthinking_budget\b", formats.template) is not None


def _budget(body: ChatCompletionBody) -> int | None:
    given = {
        name: check_range(name, value, 0, None) for name in _BUDGET_FIELDS if (value := getattr(body, name)) is not None
    }
    if len(set(given.values())) > 1:
        raise InvalidRequestError(
            f"thinking_token_budget and reasoning_budget_tokens mean the same, got {list(given.values())}",
            param="reasoning_budget_tokens",
        )
    return next(iter(given.values()), None)


_OTHER_PARAMETERS = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
"""Names that callers cannot set as template variables, because each has a parameter of its own."""


def template_options(
    body: ChatCompletionBody, tokenizer: TextTokenizer, derived: Mapping[str, object]
) -> TemplateOptions:
    """Read the options of a chat body. `derived` holds variables that come from its other fields.

    Raises:
        InvalidRequestError: See `prompt_end`.
        UnsupportedParameterError: There are documents, but the template does not use them.
    """
    variables = {**derived, **checked_kwargs(body.chat_template_kwargs)}
    if body.documents:
        if "documents" not in tokenizer.template_variables:
            raise UnsupportedParameterError(
                "documents is not supported by this model: its chat template does not name them", param="documents"
            )
        variables["documents"] = body.documents
    if body.verbosity is not None and "verbosity" in tokenizer.template_variables:
        variables["verbosity"] = body.verbosity
    return prompt_end(body.add_generation_prompt, body.continue_final_message, variables)


def prompt_end(
    add_generation_prompt: bool | None, continue_final_message: bool | None, variables: Mapping[str, object]
) -> TemplateOptions:
    """The template options for a prompt end, on any route that renders messages. Variables are passed unchanged.

    Raises:
        InvalidRequestError: Both ways to end the prompt are requested.
    """
    if continue_final_message and add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message leaves the last message open, so add_generation_prompt must not be true with it",
            param="continue_final_message",
        )
    return TemplateOptions(
        add_generation_prompt=add_generation_prompt is not False and not continue_final_message,
        continue_final_message=bool(continue_final_message),
        variables=variables,
    )


def checked_kwargs(given: Mapping[str, object] | None) -> Mapping[str, object]:
    """Check the template variables that a caller sets, and return them.

    Raises:
        InvalidRequestError: One of them has a parameter of its own.
    """
    for name in given or ():
        if name in _OTHER_PARAMETERS:
            param = f"chat_template_kwargs.{name}"
            raise InvalidRequestError(f"{param} cannot be set: {name} is a parameter of its own", param=param)
    return given or {}


def honoured_by_template(tokenizer: TextTokenizer) -> frozenset[str]:
    """Names of accepted fields that this template honours."""
    return frozenset({"verbosity", "text.verbosity"} if "verbosity" in tokenizer.template_variables else ())
